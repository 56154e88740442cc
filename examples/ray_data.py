"""Batch inference over rows of Ray Data, on a Ray cluster of this machine alone."""

import ray

from octavo.ray.data import generate


def main() -> None:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    rows = ray.data.from_items([{"prompt": f"The capital of {name} is"} for name in ("France", "Italy")])
    answers = generate(
        rows, "smollm2", sampling_params={"temperature": 0, "max_tokens": 6}, max_model_len=512
    )
    for row in answers.take_all():
        print(row["prompt"], "->", repr(row["generated_text"]))
    ray.shutdown()


if __name__ == "__main__":
    main()
