"""OpenAI's responses: one that the server keeps, one that goes on from it, one that streams."""

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
first = client.responses.create(
    model="smollm2",
    instructions="Answer in one short sentence.",
    input="What is the capital of France?",
    max_output_tokens=24,
    temperature=0,
)
print("first:", first.output_text)
second = client.responses.create(
    model="smollm2", previous_response_id=first.id, input="Say it again.", max_output_tokens=24, temperature=0
)
print("second:", second.output_text)
with client.responses.stream(model="smollm2", input="Name a colour.", max_output_tokens=12) as events:
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
print(f"streamed: {len(deltas)} pieces, {''.join(deltas)!r}")
