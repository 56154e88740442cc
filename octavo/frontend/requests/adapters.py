"""`AdapterFiles` finds the adapter that a request names, checks its folder, and digests its files.

Called by the input processor and the operator. It reads files, no tensors: what the weights are the workers
find out.
"""

from hashlib import sha256
from pathlib import Path

from octavo.base.errors import RequestError
from octavo.base.lru import LRU
from octavo.config.engine import EngineConfig
from octavo.config.lora import CONFIG, WEIGHTS, read_peft, read_shapes
from octavo.messages.adapters import AdapterPart, AdapterRef, LoRARequest, LoRASum

_REMEMBERED = 10_000
_DOWN = (".lora_A.weight", ".lora_embedding_A")
_States = tuple[tuple[int, int, int], ...]


class AdapterFiles:
    """Remembers digests while the files stay as they are."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._known: LRU[str, tuple[_States, bytes]] = LRU(_REMEMBERED)

    def resolve(self, given: LoRARequest | LoRASum | None) -> AdapterRef | None:
        """Return what the workers get. Raises RequestError, in vLLM's words where it has some."""
        if given is None:
            return None
        if not self._config.lora.enable_lora:
            raise RequestError(
                f"Got lora_request {given.lora_name!r} but LoRA is not enabled: enable_lora=True.",
                "lora_request",
            )
        listed = given.adapters if isinstance(given, LoRASum) else ((given, 1.0),)
        parts = (AdapterPart(lora.lora_path, self._digest(lora), scale) for lora, scale in listed if scale)
        return AdapterRef(given.lora_name, found) if (found := tuple(parts)) else None

    def _digest(self, lora: LoRARequest) -> bytes:
        folder = Path(lora.lora_path).expanduser()
        files = [folder / CONFIG, folder / WEIGHTS]
        try:
            states = tuple((stat.st_mtime_ns, stat.st_size, stat.st_ino) for stat in map(Path.stat, files))
        except OSError:
            read_peft(folder)  # says what is missing
            raise RequestError(f"No adapter found for {folder}.", "lora_path") from None
        known = self._known.get(lora.lora_path)
        if known is not None and known[0] == states:
            return known[1]
        self._check(folder)
        try:
            digests = [sha256(path.read_bytes()).digest() for path in files]
        except OSError as error:
            raise RequestError(f"{folder} cannot be read: {error}", "lora_path") from error
        digest = sha256(b"".join(digests)).digest()
        self._known.put(lora.lora_path, (states, digest), 1)
        return digest

    def _check(self, folder: Path) -> None:
        config, most = read_peft(folder), self._config.lora.max_lora_rank
        ranks = {config.rank, *config.rank_pattern.values()}
        ranks |= {shape[0] for name, shape in read_shapes(folder).items() if name.endswith(_DOWN) and shape}
        if (rank := int(max(ranks))) > most:
            raise RequestError(
                f"LoRA rank {rank} is greater than max_lora_rank {most}. ({folder})", "lora_path"
            )
        if min(ranks) < 1:
            raise RequestError(f"{folder}: a rank must be at least 1, found {min(ranks)}.", "lora_path")
