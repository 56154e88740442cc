// The text of a PDF file, read in the browser. What it cannot read it says.

import { PdfFile } from "./pdffile.js";
import { pageText } from "./pdftext.js";

const MAX_PAGES = 2000;

/** { text, note } of a file's bytes; note: what could not be read. Throws an Error that completes "NAME …". */
export async function pdfText(bytes) {
	const file = new PdfFile(bytes);
	await file.open();
	const pages = await file.pages(MAX_PAGES);
	const faults = new Map();
	const texts = [];
	for (const [n, page] of pages.entries()) {
		const note = (words) => faults.set(words, (faults.get(words) ?? new Set()).add(n + 1));
		const text = await pageText(file, page, note).catch(() => (note("damaged"), ""));
		if (!text.trim() && !faults.size) note("without text (pictures of it, perhaps)");
		texts.push(text);
	}
	if (!texts.some((text) => text.trim())) throw new Error(`holds no text that can be read${listed(faults, pages.length)}`);
	return { text: texts.map((text) => text.trim()).join("\n\n").trim(), note: noteOf(faults, pages.length) };
}

function noteOf(faults, count) {
	const parts = [...faults].map(([words, pages]) => `${pages.size} of ${count} pages ${words}: ${shortened([...pages])}`);
	return parts.join("; ");
}

const listed = (faults, count) => (faults.size ? `: ${noteOf(faults, count)}.` : ".");
const shortened = (pages) => (pages.length > 8 ? `${pages.slice(0, 8).join(", ")}, …` : pages.join(", "));
