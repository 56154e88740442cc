"""Anthropic's client: a message, a stream, a forced tool. Claude Code asks in the same way."""

from anthropic import Anthropic

client = Anthropic(base_url="http://127.0.0.1:8000", api_key="none")
question = [{"role": "user", "content": "What is the weather in Rome?"}]
answer = client.messages.create(
    model="smollm2", system="Answer in one sentence.", max_tokens=24, messages=question
)
print("message:", answer.content[0].text)
with client.messages.stream(model="smollm2", max_tokens=16, messages=question) as stream:
    print("pieces:", list(stream.text_stream)[:4])
CITY = {"type": "string", "enum": ["Paris", "Rome"]}
tool = {
    "name": "get_weather",
    "input_schema": {"type": "object", "properties": {"city": CITY}, "required": ["city"]},
}
call = client.messages.create(
    model="smollm2",
    max_tokens=48,
    messages=question,
    tools=[tool],
    tool_choice={"type": "tool", "name": "get_weather"},
)
print("call:", [(part.name, part.input) for part in call.content if part.type == "tool_use"])
