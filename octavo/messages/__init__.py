"""Every object that crosses a door between wings: msgspec structs in closed unions, without torch."""
