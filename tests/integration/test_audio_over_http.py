"""Speech through a whole server: OpenAI's client as it is, all formats, streams, and files that are none."""

import base64
import io
import re
import wave
from contextlib import asynccontextmanager

import av
import httpx
import numpy as np
import openai
import pytest
import pytest_asyncio

from octavo import AsyncLLM, EngineArgs
from octavo.config.server import ServerConfig
from octavo.serving.app import make_app
from tests.tiny_audio import oracle_of
from tests.tiny_speech import RATE, make_audio, make_oracle, save


@asynccontextmanager
async def serve(folder, **options):
    engine = AsyncLLM.from_engine_args(EngineArgs(model=str(folder), served_model_name=["w"], **options))
    await engine.start()
    app = make_app(engine, ServerConfig())
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://octavo/v1", timeout=60) as client:
            client.engine = engine
            yield client
    finally:
        app.state.background.end()
        await engine.shutdown()
        await app.state.store.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(make_oracle(), tmp_path_factory.mktemp("whisper"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(folder):
    async with serve(folder) as client:
        yield client


@pytest.fixture(scope="module")
def client(server):
    return openai.AsyncOpenAI(api_key="none", base_url="http://octavo/v1", http_client=server)


pytestmark = pytest.mark.asyncio(loop_scope="module")


def wav(audio, rate=RATE):
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes((audio * 32767).clip(-32768, 32767).astype("<i2").tobytes())
    return file.getvalue()


def encoded(audio, kind, codec):
    file = io.BytesIO()
    with av.open(file, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=48000)
        frame = av.AudioFrame.from_ndarray(audio[None].astype(np.float32), format="flt", layout="mono")
        frame.sample_rate = RATE
        resampler = av.AudioResampler(format=stream.format, layout="mono", rate=48000, frame_size=960)
        for given in (frame, None):
            for piece in resampler.resample(given):
                container.mux(stream.encode(piece))
        container.mux(stream.encode(None))
    return file.getvalue()


COLD = {"temperature_increment_on_fallback": 0}
"""All that a random model says is poor."""
MORE = {"repetition_penalty": 1.4, "max_completion_tokens": 40} | COLD
"""What makes it say this and that."""
SHORT, LONG = wav(make_audio(0)), wav(make_audio(1, 7.3))


async def transcribe(client, content=SHORT, **options):
    asked = {"language": "en", "extra_body": MORE} | options
    return await client.audio.transcriptions.create(model="w", file=("a.wav", content), **asked)


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")
async def test_openai_client(client):
    made = await transcribe(client)
    assert made.text and made.usage.type == "duration" and made.usage.seconds == 2
    assert (await transcribe(client, wav(make_audio(5)))).text != made.text
    assert (told := (await transcribe(client, prompt="zz")).text) != made.text
    assert (await transcribe(client, extra_body=MORE | {"hotwords": "zz"})).text == told
    translated = await client.audio.translations.create(model="w", file=("a.wav", SHORT), extra_body=MORE)
    assert translated.text and translated.text != made.text


async def test_long_audio_as_segments_and_words(client):
    both = ["segment", "word"]
    made = await transcribe(client, LONG, response_format="verbose_json", timestamp_granularities=both)
    assert made.duration == 7.3 and made.language == "en" and len(made.segments) > 3
    times = [time for segment in made.segments for time in (segment.start, segment.end)]
    assert times == sorted(times) and times[0] >= 0 and times[-1] <= 7.3
    assert "".join(segment.text for segment in made.segments).strip() == made.text
    said = "".join(word.word for word in made.words)
    assert said == "".join(segment.text for segment in made.segments)
    starts = [word.start for word in made.words]
    assert starts == sorted(starts) and all(word.end >= word.start for word in made.words)
    assert starts[-1] > 5 and made.words[-1].end <= 7.32
    assert all(0 < segment.no_speech_prob < 1 for segment in made.segments)
    alone = await transcribe(client, LONG, response_format="verbose_json")
    assert alone.words is None and alone.text == made.text


async def test_a_transcript_that_fills_the_context_has_words(client):
    asked = {"response_format": "verbose_json", "timestamp_granularities": ["word"]}
    made = await transcribe(client, extra_body={"repetition_penalty": 1.4, "temperature": 0} | COLD, **asked)
    assert made.words and made.words[-1].end <= made.duration + 0.02


async def verbose(client, **more):
    return await transcribe(client, LONG, response_format="verbose_json", extra_body=MORE | more)


async def test_poor_transcripts_are_decoded_again(client):
    """Hotter and hotter, until they are good enough; those that are keep their temperature."""
    hot = await verbose(client, temperature_increment_on_fallback=0.5, seed=1)
    assert {segment.temperature for segment in hot.segments} == {1.0}
    cold = await verbose(client, temperature_increment_on_fallback=0)
    assert {segment.temperature for segment in cold.segments} == {0.0} and cold.text != hot.text
    easy = {"compression_ratio_threshold": 1000, "logprob_threshold": -1000}
    kept = await verbose(client, temperature_increment_on_fallback=0.5, **easy)
    assert kept.text == cold.text
    scores = sorted(segment.avg_logprob for segment in cold.segments)
    some = easy | {"logprob_threshold": (scores[0] + scores[-1]) / 2}
    mixed = await verbose(client, temperature_increment_on_fallback=1, seed=1, **some)
    assert {segment.temperature for segment in mixed.segments} == {0.0, 1.0}


async def test_silence_has_no_text(client):
    """A window that has no speech, as the model finds, and whose transcript is guesswork."""
    made = await verbose(client, no_speech_threshold=0, logprob_threshold=0)
    assert made.text == "" and made.segments == []
    silent = {"no_speech_threshold": 0, "logprob_threshold": 0}
    plain = await transcribe(client, LONG, extra_body=MORE | silent)
    assert plain.text == ""


@pytest.mark.parametrize(("kind", "mark"), [("srt", ","), ("vtt", ".")])
async def test_subtitles(client, kind, mark):
    text = await transcribe(client, LONG, response_format=kind)
    clock = rf"\d\d:\d\d:\d\d\{mark}\d{{3}}"
    assert len(re.findall(rf"(?m)^{clock} --> {clock}$", text)) > 3
    assert text.startswith("1\n" if kind == "srt" else "WEBVTT\n\n")
    times = re.findall(clock, text)
    assert times == sorted(times)


async def test_streams(client):
    whole = await transcribe(client, LONG)
    more = {"stream_include_usage": True, **MORE}
    events = [event async for event in await transcribe(client, LONG, stream=True, extra_body=more)]
    assert {event.type for event in events[:-1]} == {"transcript.text.delta"}
    assert events[-1].type == "transcript.text.done" and events[-1].usage.seconds == 8
    assert "".join(event.delta for event in events[:-1]).strip() == events[-1].text
    assert events[-1].text.split() == whole.text.split()
    assert all(event.object == "transcription.chunk" for event in events)


async def test_detected_language(client):
    made = await client.audio.transcriptions.create(
        model="w", file=("a.wav", SHORT), response_format="verbose_json"
    )
    assert made.language in ("en", "de", "fr")
    assert (await transcribe(client, response_format="text", language=made.language)).endswith("\n")


@pytest.mark.parametrize(
    ("kind", "codec"),
    [("ogg", "libopus"), ("matroska", "libopus"), ("flac", "flac"), ("mp4", "aac"), ("mp3", "mp3")],
)
async def test_kinds_of_files(client, kind, codec):
    made = await transcribe(client, encoded(make_audio(0), kind, codec), response_format="verbose_json")
    assert made.text and abs(made.duration - 1.5) < 0.1


DAMAGED = r"Failed to load audio: the file is damaged, or none of WAV, MP3"
PLAYLIST = b"#EXTM3U\n#EXTINF:1,\nhttp://127.0.0.1:1/a.ts\n#EXT-X-ENDLIST\n"
SVG = b"<svg xmlns='http://www.w3.org/2000/svg'/>"


@pytest.mark.parametrize(
    ("content", "form", "status", "text"),
    [
        (b"", {}, 400, DAMAGED),
        (b"no sound at all" * 100, {}, 400, DAMAGED),
        (PLAYLIST, {}, 400, DAMAGED),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", {}, 400, DAMAGED),
        (SVG, {}, 400, DAMAGED),
        (SHORT[:40], {}, 400, r"Failed to load audio: the file"),
        (wav(np.zeros(0)), {}, 400, r"Failed to load audio: the file holds no sound"),
        (b"\0" * (3 << 20), {}, 413, r"larger than max_media_bytes=2097152"),
        (SHORT, {"language": "xx"}, 400, r"Unsupported language: 'xx'. Language must be one of de, en, fr"),
        (SHORT, {"response_format": "xml"}, 400, r"response_format"),
        (SHORT, {"temperature": "9"}, 400, r"temperature"),
        (SHORT, {"use_beam_search": "true"}, 400, r"use_beam_search must be false"),
        (SHORT, {"n": "2"}, 400, r"n"),
        (SHORT, {"response_format": "srt", "stream": "true"}, 400, r"srt format doesn't support streaming"),
        (SHORT, {"timestamp_granularities[]": "word"}, 400, r"response_format=verbose_json"),
        (SHORT, {"volume": "11"}, 400, r"Unknown field 'volume'"),
        (SHORT, {"to_language": "de"}, 400, r"to_language must be en"),
        (wav(make_audio(0, 21)), {}, 400, r"The audio is longer than max_audio_seconds=20"),
    ],
)
async def test_bad_files_and_fields(limited, content, form, status, text):
    answer = await limited.post("/audio/transcriptions", files={"file": ("a.wav", content)}, data=form)
    assert answer.status_code == status, answer.text
    message = answer.json()["error"]["message"]
    assert re.search(text, message) and "0x" not in message and "/etc" not in message
    good = await limited.post(
        "/audio/transcriptions", files={"file": ("a.wav", SHORT)}, data={"max_completion_tokens": "4"}
    )
    assert good.status_code == 200


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def limited(folder):
    async with serve(folder, max_media_bytes=2 << 20, max_audio_seconds=20.0) as client:
        yield client


TEMPLATE = (
    "{% for m in messages %}{% for p in m['content'] %}{% if p['type'] == 'audio' %}<image> {% else %}"
    "{{ p['text'] }} {% endif %}{% endfor %}{% endfor %}"
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hearing():
    folder = oracle_of("Qwen2AudioForConditionalGeneration")[1]
    async with serve(folder, max_model_len=512, chat_template=TEMPLATE) as client:
        yield client


async def test_audio_in_chat(hearing):
    """OpenAI's part and vLLM's, from the client; usage counts what was heard."""
    client = openai.AsyncOpenAI(api_key="none", base_url="http://octavo/v1", http_client=hearing)
    data = base64.b64encode(SHORT).decode()

    async def ask(*parts):
        content = [{"type": "text", "text": "5 6"}, *parts, {"type": "text", "text": "7"}]
        return await client.chat.completions.create(
            model="w", messages=[{"role": "user", "content": content}], max_tokens=8, temperature=0
        )

    first = await ask({"type": "input_audio", "input_audio": {"data": data, "format": "wav"}})
    assert first.usage.prompt_tokens_details.audio_tokens == 37 and first.usage.prompt_tokens == 40
    url = {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{data}"}}
    assert (await ask(url)).choices[0].message.content == first.choices[0].message.content
    other = base64.b64encode(wav(make_audio(7, 1.0))).decode()
    both = await ask(url, {"type": "input_audio", "input_audio": {"data": other, "format": "wav"}})
    assert both.usage.prompt_tokens_details.audio_tokens == 37 + 25
    card = (await hearing.get("/models")).json()["data"][0]
    assert card["input_modalities"] == ["text", "audio"]
    for part, text in [
        (
            {"type": "input_audio", "input_audio": {"format": "wav"}},
            "must have its audio under 'input_audio'",
        ),
        ({"type": "input_audio", "input_audio": {"data": "%%"}}, "no valid base64"),
        ({"type": "audio_url", "audio_url": {"url": "http://127.0.0.1:9/a.wav"}}, "not public"),
        ({"type": "image_url", "image_url": {"url": url["audio_url"]["url"]}}, "At most 0 image"),
    ]:
        with pytest.raises(openai.BadRequestError, match=text):
            await ask(part)
    answer = await hearing.post("/audio/transcriptions", files={"file": ("a", SHORT)})
    assert answer.status_code == 400 and "does not support Transcriptions API" in answer.text


async def test_bodies_that_are_no_forms(server):
    answer = await server.post("/audio/transcriptions", json={"file": "a"})
    assert answer.status_code == 415 and "multipart/form-data" in answer.text
    answer = await server.post("/audio/transcriptions", files={"file": ("a", SHORT)}, data={"model": "other"})
    assert answer.status_code == 404
    answer = await server.post("/audio/transcriptions", files={"other": ("a", SHORT)})
    assert answer.status_code == 400 and "needs a field file" in answer.text
