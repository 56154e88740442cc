"""The command line: one module per subcommand, each with `configure(parser)` and `run(args) -> status`."""
