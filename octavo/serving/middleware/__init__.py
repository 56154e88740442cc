"""What stands between network and routes: small pure ASGI applications, one concern each; see `stack`."""
