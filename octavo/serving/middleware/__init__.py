"""What stands between the network and the routes: small pure ASGI applications, one concern each, see `stack`."""
