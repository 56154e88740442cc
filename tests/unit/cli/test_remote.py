"""`octavo chat --url` and `complete`: against a scripted server that speaks OpenAI's protocol."""

import io
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import octavo
from octavo.base.errors import ConfigError, OctavoError, Overloaded, RequestError, UnknownModel
from octavo.cli.main import main
from octavo.cli.remote import Remote
from tests.unit.cli.fake_llm import FakeLLM


class Script:
    """What the server answers, and what it was asked."""

    def __init__(self):
        self.status = 200
        self.lines = None
        self.asked = []
        self.keys = []

    def answer(self, body):
        """The stream of an answer: as scripted, else one that echoes."""
        if self.lines is not None:
            return self.lines
        words = ["echo ", *(body.get("prompt") or body["messages"][-1]["content"]).split()]
        texts = [{"text": word} if "prompt" in body else {"delta": {"content": word}} for word in words]
        usage = {"choices": [], "usage": {"completion_tokens": 7}}
        return [": hello", *(sse({"choices": [text]}) for text in texts), sse(usage), "data: [DONE]"]


def sse(event):
    return "data: " + json.dumps(event)


@pytest.fixture
def script():
    return Script()


@pytest.fixture
def url(script):
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_GET(self):
            script.keys.append(self.headers.get("Authorization"))
            self.reply(
                {"data": [{"id": "the-model"}]} if self.path == "/v1/models" else {"error": "no such page"}
            )

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            script.asked.append((self.path, body))
            if script.status != 200:
                self.reply({"error": {"message": "not like that"}})
                return
            self.send_response(200)
            self.end_headers()
            for line in script.answer(body):
                self.wfile.write(line.encode() + b"\n\n")

        def reply(self, content):
            self.send_response(script.status)
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_chat_asks_the_server(url, script, capsys):
    words = [
        "chat",
        "--url",
        url,
        "-q",
        "hi there",
        "--system-prompt",
        "be kind",
        "--top-p",
        "0.5",
        "--stats",
    ]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert out == "echo hithere\n"
    assert "7 tokens in" in err
    assert "first token after" in err
    [(path, body)] = script.asked
    assert path == "/v1/chat/completions"
    assert body == {
        "model": "the-model",
        "stream": True,
        "stream_options": {"include_usage": True},
        "top_p": 0.5,
        "messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi there"}],
    }


def test_a_conversation_goes_on_after_a_refusal(url, script, capsys, monkeypatch):
    def lines():
        yield "one"
        script.status = 400
        yield "two"
        script.status = 200
        yield "three"

    monkeypatch.setattr("octavo.cli.chat.lines", lines)
    assert main(["chat", "--url", url + "/v1/", "--model-name", "mine"]) == 0
    out, err = capsys.readouterr()
    assert out == "echo one\necho three\n"
    assert "not like that (status 400)" in err
    path, body = script.asked[-1]
    assert (path, body["model"]) == ("/v1/chat/completions", "mine")
    assert [message["content"] for message in body["messages"]] == ["one", "echo one", "three"]


def test_complete_asks_the_server(url, script, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("once upon\n\na time\n"))
    assert main(["complete", "--url", url, "--max-tokens", "9"]) == 0
    assert capsys.readouterr().out == "echo onceupon\necho atime\n"
    assert [(path, body["prompt"], body["max_tokens"]) for path, body in script.asked] == [
        ("/v1/completions", "once upon", 9),
        ("/v1/completions", "a time", 9),
    ]


def test_complete_runs_a_model_here(capsys, monkeypatch):
    class Launcher:
        @staticmethod
        def from_engine_args(args):
            assert args.model == "some-model"
            return FakeLLM(args, chat_template=False)

    monkeypatch.setitem(vars(octavo), "LLM", Launcher)
    assert main(["complete", "some-model", "-q", "as it stands", "--stats"]) == 0
    out, err = capsys.readouterr()
    assert out == "echo as it stands\n"
    assert "4 tokens in" in err


def test_ctrl_c_stops_an_answer(url, script, capsys, monkeypatch):
    monkeypatch.setattr("octavo.cli.terminal.Pace.note", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert main(["chat", "--url", url, "-q", "hi"]) == 0
    assert capsys.readouterr().out == "echo \n"


def test_the_key_is_sent(url, script, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "from-the-environment")
    main(["complete", "--url", url, "-q", "a"])
    main(["complete", "--url", url, "-q", "a", "--api-key", "given"])
    assert script.keys == ["Bearer from-the-environment", "Bearer given"]


def test_what_does_not_go_with_a_server(url, capsys):
    assert main(["chat", "--url", url, "-q", "a", "--max-num-seqs", "3", "--enable-lora"]) == 2
    assert "leave out --enable-lora, --max-num-seqs" in capsys.readouterr().err
    assert main(["chat", "--url", "ftp://x", "-q", "a"]) == 2
    assert "must look like http://" in capsys.readouterr().err


def test_no_server_is_said_with_what_to_do(capsys):
    assert main(["chat", "--url", "http://127.0.0.1:9", "-q", "a"]) == 1
    err = capsys.readouterr().err
    assert "No server answers at http://127.0.0.1:9 " in err
    assert "octavo serve" in err


@pytest.mark.parametrize(
    ("status", "error"),
    [(400, RequestError), (401, ConfigError), (404, UnknownModel), (503, Overloaded), (500, OctavoError)],
)
def test_statuses_become_errors(url, script, status, error):
    remote = Remote(url)
    script.status = status
    with pytest.raises(error, match=f"not like that .status {status}") as raised:
        list(remote.complete("a"))
    assert type(raised.value) is error


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([sse({"choices": [{"text": "a"}]})], "ended the answer too early"),
        ([sse({"error": {"message": "out of memory"}})], "out of memory"),
        (["data: {nonsense"], "no JSON object"),
        (["data: " + "[" * 5000], "no JSON object"),
    ],
)
def test_streams_that_break_off(url, script, lines, says):
    script.lines = lines
    with pytest.raises(OctavoError, match=says):
        list(Remote(url, model="m").complete("a"))


def test_strange_chunks_have_no_text(url, script):
    strange = [{"choices": None}, {"choices": [{"delta": {"content": 5}}]}, {"choices": [{"delta": None}]}]
    script.lines = [
        "event: x",
        *map(sse, strange),
        sse({"choices": [{"delta": {"content": "ok"}}]}),
        "data: [DONE]",
    ]
    pieces = list(Remote(url, model="m").chat([]))
    assert "".join(piece.text for piece in pieces) == "ok"
