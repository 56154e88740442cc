// The server's HTTP interface. Addresses are relative, so that the page works below any path.

const KEY = "octavo-key";

/** The API key, kept for the life of this tab. */
export const key = {
	get: () => sessionStorage.getItem(KEY) ?? "",
	set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

/** What the server answered instead of what was asked for. status: of HTTP; 0 = within a stream. */
export class ServerError extends Error {
	constructor(message, status = 0) {
		super(message);
		this.status = status;
	}
}

/** Any response, asked for with the key. */
export function fetched(path, options = {}) {
	const headers = { ...options.headers, ...(key.get() && { Authorization: `Bearer ${key.get()}` }) };
	return fetch(path, { cache: "no-store", ...options, headers });
}

/** A response that is fine; throws ServerError with the server's own words for any other. */
export async function request(path, options) {
	const response = await fetched(path, options);
	if (!response.ok) throw new ServerError(await reasonOf(response), response.status);
	return response;
}

/** Chunks of a chat completion as they come, until [DONE]. Throws ServerError, and AbortError when stopped. */
export const chat = (body, signal) => chunks("v1/chat/completions", body, signal);

/** The same of a plain completion. */
export const completion = (body, signal) => chunks("v1/completions", body, signal);

async function* chunks(path, body, signal) {
	const response = await request(path, {
		method: "POST",
		headers: { "Content-Type": "application/json" },
		body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } }),
		signal,
	});
	for await (const data of events(response.body)) {
		if (data === "[DONE]") return;
		const chunk = JSON.parse(data);
		if (chunk.error) throw new ServerError(chunk.error.message ?? "The server could not go on.");
		yield chunk;
	}
	throw new ServerError("The connection was cut before the answer was complete.");
}

/** The data of each server-sent event. */
async function* events(body) {
	const reader = body.pipeThrough(new TextDecoderStream()).getReader();
	let rest = "";
	try {
		for (;;) {
			const { value, done } = await reader.read();
			if (done) return;
			const lines = (rest + value).split("\n");
			rest = lines.pop();
			for (const line of lines) {
				if (line.startsWith("data:")) yield line.slice(5).trim();
			}
		}
	} finally {
		reader.cancel().catch(() => {}); // the connection may be gone already
	}
}

async function reasonOf(response) {
	const text = await response.text();
	try {
		const { error } = JSON.parse(text);
		if (error?.message) return error.message;
	} catch {
		// not JSON: a proxy's page, perhaps
	}
	return `The server answered ${response.status} ${response.statusText}`.trim() + ".";
}
