"""Several prompts at once; options of the engine on the command line, the script's own beside them."""

from vllm import LLM, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser


def parse():
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(model="smollm2")
    sampling = parser.add_argument_group("Sampling parameters")
    sampling.add_argument("--max-tokens", type=int)
    sampling.add_argument("--temperature", type=float)
    return vars(parser.parse_args())


def main(args):
    max_tokens, temperature = args.pop("max_tokens"), args.pop("temperature")
    llm = LLM(**args)
    sampling_params = llm.get_default_sampling_params()
    if max_tokens is not None:
        sampling_params.max_tokens = max_tokens
    if temperature is not None:
        sampling_params.temperature = temperature
    prompts = ["Hello, my name is", "The capital of France is"]
    for output in llm.generate(prompts, sampling_params):
        print(
            f"Prompt: {output.prompt!r} -> {output.outputs[0].text!r},"
            f" {len(output.outputs[0].token_ids)} tokens"
        )


if __name__ == "__main__":
    main(parse())
