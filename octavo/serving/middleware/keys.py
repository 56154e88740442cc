"""`KeyCheck`: with keys configured, everything but a short list of open paths needs one of them.

What an admin's key may do beyond the others is the routes' affair.

The path that is looked up is the one that routes; what is not on the list is closed, whatever it is.
"""

import hashlib
import hmac
from collections.abc import Collection, Sequence

from starlette._utils import get_route_path
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.config.secret import Secret
from octavo.serving.errors import HTTPError, error_response
from octavo.serving.middleware import headers

_REFUSAL = HTTPError(
    401,
    "A key is needed, and was not given or is wrong: send the header Authorization: Bearer KEY.",
    headers={"WWW-Authenticate": "Bearer"},
)


class KeyCheck:
    """Refuses 401; sets `tenant`, `is_admin` and (several keys) `cache_salt` in `scope["state"]`."""

    def __init__(
        self,
        app: ASGIApp,
        secrets: Sequence[Secret],
        open_paths: Collection[str],
        admin_secrets: Collection[Secret] = (),
    ) -> None:
        """admin_secrets: those of `secrets` that are admins'."""
        self._app = app
        self._secrets = secrets
        self._admin_secrets = admin_secrets
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        secret = self._find(_key(scope))
        if secret is not None:
            scope["state"]["tenant"] = secret.tenant
            scope["state"]["is_admin"] = secret in self._admin_secrets
            scope["state"]["cache_salt"] = secret.cache_salt if len(self._secrets) > 1 else ""
        elif not self._is_open(scope):
            await error_response(_REFUSAL)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        is_read = scope["type"] == "http" and scope["method"] in ("GET", "HEAD")
        return is_read and get_route_path(scope) in self._open_paths

    def _find(self, key: str) -> Secret | None:
        """Whose key this is. Takes the same time whichever key matches, or none."""
        digest = hashlib.sha256(key.encode("latin-1")).digest()
        found = None
        for secret in self._secrets:
            if hmac.compare_digest(secret.digest, digest):
                found = secret
        return found


def _key(scope: Scope) -> str:
    """What is borne: of the header Authorization, or x-api-key, Anthropic's; "" when neither has one."""
    authorization = headers.values(scope, b"authorization")
    if not authorization:
        return headers.value(scope, b"x-api-key")
    scheme, _, key = authorization[0].partition(" ")
    return key.strip() if len(authorization) == 1 and scheme.lower() == "bearer" else ""
