"""`WeightUpdates`: other weights in a running engine, from files or from a trainer. A part of `Operator`.

All ranks have theirs before one of them computes with them; the weights in use stay until then.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from octavo.base.errors import EngineDead, OctavoError, RequestError
from octavo.config.engine import EngineConfig
from octavo.frontend.pausing import Core, PauseMode, Pausing

_LOOK_S = 0.005
"""Between looks whether the workers are done."""


class WeightUpdates(Pausing):
    """The verbs about weights."""

    def __init__(self, config: EngineConfig, core: Core) -> None:
        super().__init__(core)
        self._config = config
        self.forget_media: Callable[[], None] = lambda: None
        """Drops the images that the front-end has prepared."""

    async def update_weights_from_disk(
        self, model_path: str, weight_version: str = "", mode: PauseMode = "keep"
    ) -> None:
        """Compute with the weights of another folder or file of the same architecture.

        Raises OctavoError with the reason if a rank cannot load them; nothing has changed then.

        model_path: on the machine of the engine; memory must hold both weights for a moment
        weight_version: their name, see `get_weight_version`
        mode: what becomes of open requests: abort, wait (finish them first), or keep (go on behind what
            they have, by the new weights)
        """
        async with self.standing_still(mode):
            try:
                await self._core.call("stage_weights", {"path": model_path})
                await self._use_staged_weights(weight_version or model_path)
            except OctavoError:
                await self._drop_staged_weights()
                raise

    async def init_weight_transfer_engine(self, request: Mapping[str, Any]) -> None:
        """Meet a trainer that will send weights (`octavo.WeightSender`); weight_transfer_config says how.

        request: init_info, of nccl: master_address, master_port, rank_offset, world_size; of all: packed,
            packed_buffer_size_bytes
        """
        await self._transfer("init_weight_transfer_engine", init_info=_dict_in(request, "init_info"))

    async def shutdown_weight_transfer_engine(self) -> None:
        """Leave the trainer."""
        await self.collective_rpc("shutdown_weight_transfer_engine")

    async def start_weight_update(self) -> None:
        """Begin to take weights from the trainer, beside those in use. Memory must hold both."""
        await self._core.call("start_weight_update")

    async def update_weights(self, request: Mapping[str, Any]) -> None:
        """Take some of the tensors of a checkpoint from the trainer, who sends them meanwhile.

        Raises OctavoError if a rank cannot use them; the update is over then, and nothing has changed.

        request: update_info: names, dtype_names, shapes; of ipc: ipc_handles
        """
        info = _dict_in(request, "update_info")
        if self._config.parallel.device == "cpu":
            await self._transfer("update_weights", update_info=info)
            return
        async with self.standing_still("keep"):  # no graph may be captured meanwhile
            await self._transfer("update_weights", update_info=info)

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Compute with the weights that have come, on all ranks; open requests go on by them.

        Raises OctavoError if some are missing; nothing has changed then.

        weight_version: their name, see `get_weight_version`
        """
        async with self.standing_still("keep"):
            await self._transfer("finish_weight_update")
            await self._use_staged_weights(weight_version or await self.get_weight_version())

    async def update_weight_version(self, new_version: str) -> None:
        """Call the weights in use so."""
        await self._core.call("update_weight_version", {"version": new_version})

    async def get_weight_version(self) -> str:
        """Return the name of the weights; "default" for those of the start."""
        return str(await self._core.call("weight_version"))

    async def _use_staged_weights(self, version: str) -> None:
        await self._core.call("use_staged_weights", {"version": version})
        self.forget_media()

    async def _drop_staged_weights(self) -> None:
        with suppress(EngineDead):
            await self.collective_rpc("drop_staged_weights")

    async def _transfer(self, verb: str, **arguments: Any) -> None:
        """Have every rank do its part, while steps go on; if one cannot, the update is over."""
        try:
            await self.collective_rpc(verb, kwargs=arguments)
            while None in (states := await self.collective_rpc("weight_transfer_state")):
                await self._core.rest(_LOOK_S)
            if reasons := [reason for reason in states if reason]:
                raise RequestError(f"{verb} failed: {reasons[0]}")
        except OctavoError:
            await self._drop_staged_weights()
            raise


def _dict_in(request: Mapping[str, Any], name: str) -> Any:
    """Return what a request has under this name. Raises RequestError."""
    info = request.get(name) if isinstance(request, Mapping) else getattr(request, name, None)
    if not isinstance(info, Mapping):
        raise RequestError(f"The request needs {name}, an object; got {info!r:.100}.", name)
    return dict(info)
