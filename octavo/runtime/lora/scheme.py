"""`AdaptedScheme` wraps the scheme of a checkpoint in methods that know adapters."""

from octavo.runtime.lora.experts import AdaptedExperts
from octavo.runtime.lora.sites import ENCODER, AdaptedLinear, Sites
from octavo.runtime.quantization.method import ExpertsMethod, LinearMethod, Scheme


class AdaptedScheme(Scheme):
    """Stores matrices as another scheme does."""

    def __init__(self, inner: Scheme, sites: Sites) -> None:
        super().__init__(inner.storage, inner.config, inner.sources)
        self._inner, self.sites = inner, sites

    @classmethod
    def matches(cls, config: object) -> bool:
        return False

    def linear(self, name: str) -> LinearMethod:
        return self._adapted(self._inner.linear(name), name)

    def experts(self, name: str) -> ExpertsMethod:
        return AdaptedExperts(self._inner.experts(name), self.sites, name, self.storage.device)

    def router(self, name: str) -> LinearMethod:
        return self._adapted(self._inner.router(name), name)

    def _adapted(self, method: LinearMethod, name: str) -> LinearMethod:
        sites = self.sites.encoder if name.startswith(ENCODER) else self.sites
        return AdaptedLinear(method, sites, name, self.storage.device)
