"""What `octavo serve` needs besides the engine's options: the door to the network and its limits.

Not part of EngineArgs: an engine in a program has no port.
"""

from dataclasses import dataclass

from octavo.config.option import option
from octavo.config.secret import Secret


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """One HTTP server."""

    models: str = option("", "YAML file of several models, each loaded when it is first asked for.")
    models_dir: str = option("", "Folder whose model folders and GGUF files are served, each by its name.")
    models_max: int = option(
        0,
        "Engine processes for several models at most; the least recently used go. 0 = 4, or as in --models.",
    )
    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 = every interface (give a key then).")
    port: int = option(8000, "TCP port; 0 = any free one.")
    uds: str = option("", "Listen on this Unix socket instead of a TCP port; only its owner may connect.")
    insecure: bool = option(False, "Allow a public address without a key.")
    api_key: list[Secret] = option(
        [], "Keys, one of which a request must bear; also OCTAVO_API_KEY, VLLM_API_KEY."
    )
    api_key_file: str = option("", "File with one key per line.")
    admin_api_key: list[Secret] = option(
        [], "Keys for the admin verbs, which the others then may not use; also OCTAVO_ADMIN_API_KEY."
    )
    dev_mode: bool = option(
        False, "Mount /server_info and the admin verbs without a key too; also VLLM_SERVER_DEV_MODE=1."
    )
    allowed_hosts: list[str] = option(
        [], "Host headers that are answered on a loopback address, besides localhost and IPs; * = any."
    )
    allowed_origins: list[str] = option([], "Origins of web pages that may call the server (CORS); * = any.")
    allowed_methods: list[str] = option([], "Methods that those pages may use; empty = all.")
    allowed_headers: list[str] = option([], "Headers that those pages may send; empty = all.")
    allow_credentials: bool = option(False, "Whether those pages may send credentials.")
    ssl_keyfile: str = option("", "Private key file: serve HTTPS.")
    ssl_certfile: str = option("", "Certificate file.")
    ssl_ca_certs: str = option("", "Authorities whose client certificates are accepted.")
    ssl_cert_reqs: int = option(0, "Client certificates: 0 = none, 1 = optional, 2 = required.")
    ssl_ciphers: str = option("", "Ciphers for TLS 1.2, in OpenSSL's notation; empty = OpenSSL's choice.")
    root_path: str = option("", "Path under which a proxy shows the server.")
    headless: bool = option(
        False, "Serve no HTTP: run this node's ranks for the engine on node 0 (--nnodes, --node-rank)."
    )
    api_server_count: int = option(
        0,
        "Processes that speak HTTP, on one port, in front of one engine; 0 = one, or with a GPU one per "
        "4 cores, 4 at most.",
    )
    strict: bool = option(True, "Answer 400 to request fields that octavo does not know.")
    on_crash: str = option(
        "replay",
        "When the engine core dies: start it anew and go on with open requests (replay), or end these "
        "(restart); or exit.",
        choices=("replay", "restart", "exit"),
    )
    preload_prefixes: str = option(
        "", "File of JSON lines with prompt or messages: prefixes to have in the cache from the start."
    )
    max_request_bytes: int = option(16 * 1024 * 1024, "Largest body of a request; larger ones get 413.")
    max_pending_body_bytes: int = option(
        256 * 1024 * 1024,
        "Bytes of bodies on their way in at most, per API process, half of them of one key or address; a "
        "body that would go beyond gets 503.",
    )
    max_header_bytes: int = option(64 * 1024, "Largest head of a request; larger ones get 431.")
    max_connections: int = option(4096, "Connections open at once; more wait in the listen queue.")
    keep_alive_timeout: float = option(5.0, "Seconds an idle connection stays open.")
    header_timeout: float = option(10.0, "Seconds within which the head of a request must come.")
    body_timeout: float = option(60.0, "Seconds within which the body of a request must come.")
    write_timeout: float = option(60.0, "Seconds without progress after which a reader is given up.")
    store: str = option(
        "", "File that keeps batches, their files and responses; empty = they are kept until the server ends."
    )
    store_max_bytes: int = option(2**30, "Bytes of the store's file at most; the oldest go, or new get 507.")
    store_max_age: float = option(2592000.0, "Seconds after which what is in the store is forgotten.")
    sse_keep_alive_interval: float = option(0.0, "Seconds between comments in a silent stream; 0 = none.")
    lora_modules: list[str] = option(
        [], "Adapters that are served by name: name=path, or a JSON object of name, path, base_model_name."
    )
    lora_folder: str = option(
        "",
        "Folder of adapters: who asks for a model of an unknown name gets the adapter that is there; those "
        "loaded at run time must lie in it. Also OCTAVO_LORA_FOLDER, VLLM_LORA_RESOLVER_CACHE_DIR.",
    )
    allow_runtime_lora_updating: bool = option(
        False,
        "Answer /v1/load_lora_adapter and /v1/unload_lora_adapter; also VLLM_ALLOW_RUNTIME_LORA_UPDATING=1.",
    )
    response_role: str = option("assistant", "Role of answers.")
    default_chat_template_kwargs: dict[str, object] = option(
        {}, "Variables of the chat template that requests may override."
    )
    enable_force_include_usage: bool = option(False, "Every stream ends with a chunk of usage.")
    enable_prompt_tokens_details: bool = option(False, "Usage says how many prompt tokens were cached.")
    enable_per_request_metrics: bool = option(
        False, "Answers carry their latencies, and what was guessed of them ahead."
    )
    enable_request_id_headers: bool = option(False, "Answers carry X-Request-Id.")
    return_tokens_as_token_ids: bool = option(False, "Logprobs name tokens as token_id:N.")
    disable_access_log: bool = option(False, "No line per request.")
    open_monitoring: bool = option(False, "/metrics, /ready, /ping, /version and /load need no key.")
    disable_page: bool = option(False, "No page at /, no /docs, no /openapi.json.")
    metric_names: str = option("vllm", "Prefix of the names on /metrics.", choices=("vllm", "octavo", "both"))
