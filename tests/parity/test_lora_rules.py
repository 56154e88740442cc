"""Adapters trained on made-up rules: every request obeys its own, and after a reload the new one.

tests/parity/test_lora.py does without training.
"""

import copy
import warnings

import peft
import pytest
import torch

from octavo import SamplingParams
from octavo.lora.request import LoRARequest
from tests import peft_adapters
from tests.parity.test_lora import engine
from tests.tiny_models import make_oracle, make_prompts, save, tiny_config

RULES = [(17, 23), (31, 5), (90, 64), (44, 101)]
"""Answers go to and fro between two tokens, whatever was asked."""
ASKED = 1
"""The last token of every question."""
NUM_TOKENS, NUM_STEPS = 8, 100
ENOUGH = 0.95


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    oracle = make_oracle(tiny_config("LlamaForCausalLM"))
    return oracle, save(oracle, tmp_path_factory.mktemp("llama"))


def train(oracle, rule, folder) -> str:
    """Teach an adapter a rule; returns its folder."""
    torch.manual_seed(sum(rule))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = peft.LoraConfig(
            task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules=peft_adapters.ALL_LINEAR
        )
        model = peft.get_peft_model(copy.deepcopy(oracle), config).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    answer = torch.tensor([rule[i % 2] for i in range(NUM_TOKENS)])
    for _ in range(NUM_STEPS):
        length = int(torch.randint(8, 41, ()))
        questions = torch.randint(0, 131, (8, length))
        questions[:, -1] = ASKED
        ids = torch.cat([questions, answer.expand(8, -1)], 1)
        labels = ids.clone()
        labels[:, :length] = -100
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return peft_adapters.save(model.eval(), folder)


def obedience(outputs, rules) -> float:
    """The share of answers that are wholly as their rules say."""
    wanted = [[rule[i % 2] for i in range(NUM_TOKENS)] for rule in rules]
    return sum(o.outputs[0].token_ids == w for o, w in zip(outputs, wanted, strict=True)) / len(wanted)


@pytest.mark.slow
def test_every_request_obeys_its_own_rule(base, tmp_path):
    oracle, folder = base
    paths = [train(oracle, rule, tmp_path / str(i)) for i, rule in enumerate(RULES)]
    loras = [LoRARequest(f"rule{i}", i + 1, path) for i, path in enumerate(paths[:3])]
    llm = engine(folder, max_loras=2, max_num_seqs=8)
    prompts = [[*prompt, ASKED] for prompt in make_prompts(131, (39, 12, 21, 33) * 5)]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    chosen = [i % 4 for i in range(len(prompts))]
    asked = [loras[i] if i < 3 else None for i in chosen]

    def obeyed(rules):
        outputs = llm.generate(prompts, params, lora_request=asked, use_tqdm=False)
        own = [(o, rules[i]) for o, i in zip(outputs, chosen, strict=True) if i < 3]
        plain = [o.outputs[0].token_ids for o, i in zip(outputs, chosen, strict=True) if i == 3]
        return obedience([o for o, _ in own], [rule for _, rule in own]), plain

    first, plain = obeyed(RULES)
    assert first >= ENOUGH
    others = llm.generate(prompts[3::4], params, use_tqdm=False)
    assert plain == [o.outputs[0].token_ids for o in others], "the base learned nothing"
    # Another adapter under the first one's name, id and folder: its rule holds, also behind cached prompts.
    for file in tmp_path.joinpath("3").glob("adapter_*"):
        file.replace(tmp_path / "0" / file.name)
    again, plain_again = obeyed([RULES[3], *RULES[1:3]])
    assert again >= ENOUGH and plain_again == plain
    assert obeyed(RULES)[0] < 0.7, "the measure tells rules apart"
