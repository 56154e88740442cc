// Text as letters that a link may hold: deflated, in base64 for addresses.

const MAX_UNPACKED = 20 * 2 ** 20;

export async function packed(text) {
	const bytes = await through(new Blob([text]), new CompressionStream("deflate-raw"));
	const letters = Array.from(bytes, (byte) => String.fromCharCode(byte)).join("");
	return btoa(letters).replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, "");
}

/** Throws when the letters were not packed here, or hold more than 20 MB. */
export async function unpacked(letters) {
	const bytes = Uint8Array.from(atob(letters.replaceAll("-", "+").replaceAll("_", "/")), (letter) => letter.charCodeAt(0));
	return new TextDecoder().decode(await through(new Blob([bytes]), new DecompressionStream("deflate-raw")));
}

/** The bytes of a blob behind a stream; what is more than `most` is an Error. */
export async function through(blob, stream, most = MAX_UNPACKED) {
	const parts = [];
	let size = 0;
	for await (const part of blob.stream().pipeThrough(stream)) {
		parts.push(part);
		if ((size += part.length) > most) throw new Error("it holds too much.");
	}
	return new Uint8Array(await new Blob(parts).arrayBuffer());
}
