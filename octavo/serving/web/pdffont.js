// A PDF's font as far as text needs it: which letters its codes are, and how wide.

import { Name, Syntax, Word } from "./pdfsyntax.js";

const SIGNS = `space=  exclam=! quotedbl=" numbersign=# dollar=$ percent=% ampersand=& quotesingle=' quoteright=’ quoteleft=‘ parenleft=( parenright=) asterisk=* plus=+
	comma=, hyphen=- minus=− period=. slash=/ zero=0 one=1 two=2 three=3 four=4 five=5 six=6 seven=7 eight=8 nine=9 colon=: semicolon=; less=< equal== greater=> question=? at=@
	bracketleft=[ backslash=\\ bracketright=] underscore=_ braceleft={ bar=| braceright=} asciitilde=~ quotedblleft=“ quotedblright=” endash=– emdash=— bullet=• ellipsis=…
	ff=ff fi=fi fl=fl ffi=ffi ffl=ffl dotlessi=ı germandbls=ß section=§ degree=° copyright=© Euro=€ ae=æ oe=œ oslash=ø AE=Æ OE=Œ Oslash=Ø multiply=×`;
const NAMED = new Map([...SIGNS.matchAll(/(\w+)=(\s|\S+)/g)].map(([, name, sign]) => [name, sign]));
const MARKS = { grave: "\u0300", acute: "\u0301", circumflex: "\u0302", tilde: "\u0303", dieresis: "\u0308", ring: "\u030a", cedilla: "\u0327", caron: "\u030c" };

/** { letters(bytes) → [[letter or undefined, width in em, whether it is the space of one byte], …] } */
export async function fontOf(file, font) {
	const isWide = String(font.get("Subtype")) === "Type0";
	const told = await codesOf(file, font.get("ToUnicode"));
	const byCode = isWide ? new Map() : simpleCodes(file, file.get(font.get("Encoding")));
	const width = widthsOf(file, font, isWide);
	const size = isWide ? 2 : 1;
	const letters = function* (bytes) {
		for (let at = 0; at + size <= bytes.length; at += size) {
			const code = isWide ? bytes.charCodeAt(at) * 256 + bytes.charCodeAt(at + 1) : bytes.charCodeAt(at);
			yield [told.get(code) ?? byCode.get(code), width(code), !isWide && code === 32];
		}
	};
	return { letters };
}

/** Code → text, from a font's own map to Unicode. */
async function codesOf(file, reference) {
	const codes = new Map();
	const syntax = new Syntax(await file.stream(reference).catch(() => ""));
	let values = [];
	for (let value; (value = syntax.next()) !== undefined; ) {
		if (!(value instanceof Word)) values.push(value);
		else {
			if (String(value) === "endbfchar") for (let n = 0; n + 1 < values.length; n += 2) codes.set(numberOf(values[n]), utf16(values[n + 1]));
			if (String(value) === "endbfrange") for (let n = 0; n + 2 < values.length; n += 3) addRange(codes, ...values.slice(n, n + 3));
			values = [];
		}
	}
	return codes;
}

function addRange(codes, first, last, target) {
	const start = numberOf(first);
	const end = Math.min(numberOf(last), start + 65535);
	for (let code = start; code <= end; code++) {
		if (Array.isArray(target)) codes.set(code, utf16(target[code - start] ?? ""));
		else codes.set(code, utf16(target.slice(0, -1) + String.fromCharCode((target.charCodeAt(target.length - 1) + code - start) & 255)));
	}
}

const bytesOf = (text) => Uint8Array.from(String(text), (letter) => letter.charCodeAt(0));
const numberOf = (bytes) => bytesOf(bytes).reduce((sum, byte) => sum * 256 + byte, 0);
const utf16 = (bytes) => new TextDecoder("utf-16be").decode(bytesOf(bytes));

/** Code → letter of a font of one byte: a code page, and what differs from it. */
function simpleCodes(file, encoding) {
	const isMap = encoding instanceof Map;
	const base = String(isMap ? encoding.get("BaseEncoding") : encoding);
	const decoder = new TextDecoder(base === "MacRomanEncoding" ? "macintosh" : "windows-1252");
	const codes = new Map(Array.from({ length: 224 }, (_, n) => [n + 32, decoder.decode(Uint8Array.of(n + 32))]));
	let code = 0;
	for (const value of (isMap && file.get(encoding.get("Differences"))) || []) {
		if (value instanceof Name) codes.set(code++, letterOf(String(value)));
		else code = file.get(value);
	}
	return codes;
}

function letterOf(name) {
	if (name.length === 1) return name;
	if (NAMED.has(name)) return NAMED.get(name);
	const hex = /^(?:uni|u)([\dA-F]{4,6})/.exec(name)?.[1];
	if (hex) return String.fromCodePoint(Math.min(parseInt(hex, 16), 0x10ffff));
	const mark = Object.keys(MARKS).find((mark) => name.slice(1) === mark);
	return mark && (name[0] + MARKS[mark]).normalize("NFC");
}

/** Code → width in em. */
function widthsOf(file, font, isWide) {
	if (!isWide) {
		const widths = file.get(font.get("Widths")) ?? [];
		const first = file.get(font.get("FirstChar")) ?? 0;
		return (code) => (file.get(widths[code - first]) || 500) / 1000;
	}
	const inner = file.get(file.get(font.get("DescendantFonts"))?.[0]) ?? new Map();
	const known = new Map();
	const list = file.get(inner.get("W")) ?? [];
	for (let n = 0; n < list.length; ) {
		const [first, second] = [list[n], file.get(list[n + 1])];
		if (Array.isArray(second)) second.forEach((width, i) => known.set(first + i, file.get(width)));
		else for (let code = first; code <= Math.min(second, first + 65535); code++) known.set(code, list[n + 2]);
		n += Array.isArray(second) ? 2 : 3;
	}
	return (code) => (known.get(code) ?? file.get(inner.get("DW")) ?? 1000) / 1000;
}
