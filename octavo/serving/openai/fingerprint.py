"""`FINGERPRINT`: which octavo answered, in every answer's system_fingerprint."""

from octavo.version import __version__

FINGERPRINT = f"octavo-{__version__}"
