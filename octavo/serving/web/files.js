// Files as what a model can be told: their text, or the picture itself.

const MAX_FILE = 50 * 2 ** 20;
const MAX_TEXT = 2_000_000;
const PICTURES = /^image\/(png|jpeg|webp|gif)$/;

/** { name, text or image, note }; note: what of it could not be read. Throws an Error that completes "NAME …". */
export async function readFile(file, takesPictures) {
	if (file.size > MAX_FILE) throw new Error("is larger than 50 MB.");
	if (file.type.startsWith("image/") && file.type !== "image/svg+xml") {
		if (!takesPictures) throw new Error("is a picture, which this model does not take.");
		if (!PICTURES.test(file.type)) throw new Error("is a picture of a kind that models do not take: PNG, JPEG, WebP and GIF are.");
		return { name: file.name, text: "", image: await addressOf(file) };
	}
	const bytes = new Uint8Array(await file.arrayBuffer());
	const isPdf = new TextDecoder("latin1").decode(bytes.subarray(0, 1024)).includes("%PDF-");
	const { text, note } = isPdf ? await (await import("./pdf.js")).pdfText(bytes) : { text: decoded(bytes), note: "" };
	const isCut = text.length > MAX_TEXT;
	const notes = [note, isCut && "only the first 2,000,000 characters were taken"].filter(Boolean);
	return { name: file.name, text: text.slice(0, MAX_TEXT), note: notes.join("; ") };
}

/** Text in UTF-8 or UTF-16, else in the Windows code page. Throws for what is no text. */
function decoded(bytes) {
	const mark = bytes[0] * 256 + bytes[1];
	if (mark === 0xfffe || mark === 0xfeff) return new TextDecoder(mark === 0xfffe ? "utf-16le" : "utf-16be").decode(bytes);
	if (bytes.subarray(0, 8192).includes(0)) throw new Error("is no text: only text and PDF files can be read.");
	try {
		return new TextDecoder("utf-8", { fatal: true }).decode(bytes);
	} catch {
		return new TextDecoder("windows-1252").decode(bytes);
	}
}

function addressOf(file) {
	return new Promise((resolve, reject) => {
		const reader = new FileReader();
		reader.onload = () => resolve(reader.result);
		reader.onerror = () => reject(new Error("cannot be read."));
		reader.readAsDataURL(file);
	});
}
