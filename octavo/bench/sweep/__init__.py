"""Many benchmarks in a row: `bench sweep serve`, `serve_workload`, `startup`, `plot`, `plot_pareto`.

Flags, folders and files are those of `vllm bench sweep`: a folder per combination, `run=N.json` for each run,
`summary.json` of all its runs, `summary.csv` of the whole experiment.
"""
