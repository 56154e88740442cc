"""`AdapterFiles` finds the adapter that a request names, checks its folder, and digests its files.

Called by the input processor and the operator. It reads files, no tensors: what the weights are the workers
find out.
"""

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from octavo.base.errors import RequestError
from octavo.base.lru import LRU
from octavo.config.engine import EngineConfig
from octavo.config.gguf_adapter import files_of, is_gguf, open_adapter
from octavo.config.lora import PeftConfig, read_peft, read_peft_files, read_shapes
from octavo.config.prompt_tuning import read_prompt_tuning
from octavo.messages import adapters
from octavo.messages.media import MediaItem

_REMEMBERED = 10_000
_DOWN = (".lora_A.weight", ".lora_embedding_A")
_NO_SUM = "an activated adapter (alora_invocation_tokens) cannot be scaled or added to others"
_States = tuple[tuple[int, int, int], ...]


class _Known(NamedTuple):
    """What is remembered of an adapter: the digest of its files, and the tokens that activate it."""

    digest: bytes
    invocation: tuple[int, ...]


class AdapterFiles:
    """Remembers digests while the files stay as they are."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._known: LRU[str, tuple[_States, _Known]] = LRU(_REMEMBERED)

    def resolve(
        self,
        given: adapters.LoRARequest | adapters.LoRASum | None,
        prompt: Sequence[int] | None = None,
        media: Sequence[MediaItem] = (),
    ) -> adapters.AdapterRef | None:
        """Return what the workers get. Raises RequestError, in vLLM's words where it has some.

        prompt: its tokens, among which an activated adapter looks for its own; media: what may need one
        """
        if given is None and media:
            has, own = {item.modality for item in media}, self._config.lora.default_mm_loras
            given = next(
                (adapters.LoRARequest(name, 1, path) for name, path in own.items() if name in has), None
            )
        if given is None:
            return None
        if not self._config.lora.enable_lora:
            raise RequestError(
                f"Got lora_request {given.lora_name!r} but LoRA is not enabled: enable_lora=True.",
                "lora_request",
            )
        listed = given.adapters if isinstance(given, adapters.LoRASum) else ((given, 1.0),)
        found = [(lora.lora_path, self._look_up(lora.lora_path), scale) for lora, scale in listed if scale]
        parts = tuple(adapters.AdapterPart(path, known.digest, scale) for path, known, scale in found)
        start = 0
        for _, known, scale in found:
            if known.invocation and (len(found) > 1 or scale != 1.0):
                raise RequestError(f"{given.lora_name!r}: {_NO_SUM}.", "lora")
            if known.invocation and prompt is not None:
                start = _last_start(prompt, known.invocation, given.lora_name)
        return adapters.AdapterRef(given.lora_name, parts, start) if parts else None

    def resolve_prompt(self, given: adapters.PromptAdapterRequest | None) -> adapters.SoftPromptRef | None:
        """Return what the workers get of a learned prompt. Raises RequestError."""
        if given is None:
            return None
        name, lora = given.prompt_adapter_name, self._config.lora
        if not lora.enable_prompt_adapter:
            raise RequestError(
                f"Got prompt_adapter_request {name!r} but prompt adapters are not enabled: "
                "enable_prompt_adapter=True.",
                "prompt_adapter_request",
            )
        config = read_prompt_tuning(Path(given.prompt_adapter_local_path).expanduser())
        most, count = lora.max_prompt_adapter_token, config.num_virtual_tokens
        if 0 < most < count:
            raise RequestError(
                f"{name!r} has {count} virtual tokens, more than max_prompt_adapter_token {most}.",
                "prompt_adapter_request",
            )
        if not 0 <= given.task_id < config.num_tasks:
            text = f"task_id must be below {config.num_tasks}, the prompt's tasks, got {given.task_id}."
            raise RequestError(text, "task_id")
        path = given.prompt_adapter_local_path
        return adapters.SoftPromptRef(
            name, path, self._look_up(path, is_lora=False).digest, count, given.task_id
        )

    def _look_up(self, path: str, *, is_lora: bool = True) -> _Known:
        folder = Path(path).expanduser()
        files = files_of(folder)
        try:
            states = tuple((stat.st_mtime_ns, stat.st_size, stat.st_ino) for stat in map(Path.stat, files))
        except OSError:
            if not is_gguf(folder):
                read_peft_files(folder)  # says what is missing
            raise RequestError(f"No adapter found for {folder}.", "lora_path") from None
        known = self._known.get(path)
        if known is not None and known[0] == states:
            return known[1]
        invocation = self._check(folder).invocation if is_lora else ()
        try:
            digests = [sha256(path.read_bytes()).digest() for path in files]
        except OSError as error:
            raise RequestError(f"{folder} cannot be read: {error}", "lora_path") from error
        found = _Known(sha256(b"".join(digests)).digest(), invocation)
        self._known.put(path, (states, found), 1)
        return found

    def _check(self, folder: Path) -> PeftConfig:
        most = self._config.lora.max_lora_rank
        if is_gguf(folder):
            config, _ = open_adapter(folder)
            ranks = {config.rank}
        else:
            config, shapes = read_peft(folder), read_shapes(folder)
            ranks = {config.rank, *config.rank_pattern.values()}
            ranks |= {
                shape[0]
                for name, shape in shapes.items()
                if name.endswith(_DOWN) and shape and not _is_of_stack(name, config)
            }
        if (rank := int(max(ranks))) > most:
            raise RequestError(
                f"LoRA rank {rank} is greater than max_lora_rank {most}. ({folder})", "lora_path"
            )
        if min(ranks) < 1:
            raise RequestError(f"{folder}: a rank must be at least 1, found {min(ranks)}.", "lora_path")
        return config


def _is_of_stack(name: str, config: PeftConfig) -> bool:
    """Return True for the ranks of all experts together."""
    module = name.partition(".lora_")[0].replace(".base_layer", "")
    return module.rpartition(".")[2] in config.stacked


def _last_start(prompt: Sequence[int], invocation: tuple[int, ...], name: str) -> int:
    """Return where the last invocation in a prompt begins. Raises RequestError: nothing else would answer."""
    length = len(invocation)
    for start in range(len(prompt) - length, -1, -1):
        if prompt[start] == invocation[0] and tuple(prompt[start : start + length]) == invocation:
            return start
    raise RequestError(
        f"The prompt has not the tokens {list(invocation)[:20]} that activate the adapter {name!r}: end it "
        "with them, or ask the base model.",
        "prompt",
    )
