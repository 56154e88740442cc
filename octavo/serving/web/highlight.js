// Colours for code: comments, strings, numbers, words of the language, names that are called. One pass over the
// text, with patterns that look at each letter a bounded number of times.

import { element } from "./dom.js";

const MAX_LENGTH = 200_000;
const COMMON = "break case catch class const continue default do else enum export false finally for from function if import in let new null return static super switch this throw true try type var void while";
const C_WORDS = `${COMMON} auto bool char delete double extern float friend goto inline int long namespace nullptr operator private protected public short signed sizeof struct template typedef typename union unsigned using virtual volatile`;
const LANGUAGES = [
	["py python", "#", "False None True and as assert async await break case class continue def del elif else except finally for from global if import in is lambda match nonlocal not or pass raise return self try while with yield"],
	["js javascript ts typescript jsx tsx mjs", "//", `${COMMON} async await extends implements instanceof interface of typeof undefined yield`],
	["c cpp c++ h hpp cc cuda cu", "//", C_WORDS],
	["java kotlin kt scala cs csharp c# dart swift php", "//", `${C_WORDS} abstract as async await echo extends final foreach fun func guard implements init instanceof interface is object override package sealed self string throws val when`],
	["go golang", "//", "break case chan const continue default defer else false for func go if import interface map nil package range return select struct switch true type var"],
	["rs rust", "//", "as async await break const continue crate dyn else enum false fn for if impl in let loop match mod move mut pub ref return self Self static struct super trait true type unsafe use where while"],
	["sh bash shell zsh console", "#", "case do done elif else esac export fi for function if in local return set shift then until while cd echo exit sudo"],
	["rb ruby", "#", "begin break case class def do else elsif end ensure false for if in module next nil not or require rescue return self super then true unless until when while yield"],
	["sql", "--", "add all alter and as between by case create delete desc distinct drop else end exists from full group having in index inner insert into is join key left like limit not null on or order outer primary right select set table then union unique update values when where with"],
	["json jsonc", "//", "true false null"],
	["yaml yml toml ini dockerfile makefile make r", "#", "true false null yes no on off from run copy cmd env function if else for in while return TRUE FALSE NULL"],
	["html xml svg vue", "<!--", ""],
	["css scss less", "/*", "important from to"],
	["lua haskell hs", "--", "and case data do else elseif end false for function if import in instance let local module nil not of or return then true type where while"],
];
const COMMENTS = {
	"#": /(?:^|(?<=\s))#[^\n]*/y,
	"//": /\/\/[^\n]*|\/\*[^]*?(?:\*\/|$)/y,
	"--": /--[^\n]*/y,
	"/*": /\/\*[^]*?(?:\*\/|$)/y,
	"<!--": /<!--[^]*?(?:-->|$)/y,
};
/** Each goes as far as it can, so that a string without an end is not looked at twice. */
const STRING = /"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)|"(?:[^"\\\n]|\\.)*\\?"?|'(?:[^'\\\n]|\\.)*\\?'?|`(?:[^`\\]|\\[^])*\\?`?/y;
const NUMBER = /(?:0[xX][\da-fA-F_]+|0[bB][01_]+|\d[\d_]*(?:\.\d[\d_]*)?(?:[eE][+-]?\d+)?)\w*/y;
const WORD = /[\p{L}_$][\p{L}\p{N}_$]*/uy;
const TAG = /<\/?[\w:-]+|\/?>/y;

/** Nodes for the text of a code block; plain text where the language is unknown. */
export function coloured(text, name) {
	const language = LANGUAGES.find(([names]) => names.split(" ").includes(name.toLowerCase()));
	if (name === "diff" || name === "patch") return text.split(/(?<=\n)/).map((line) => part({ "+": "s", "-": "k", "@": "n" }[line[0]], line));
	if (!language || text.length > MAX_LENGTH) return [text];
	const [names, comment, words] = language;
	const known = new Set(words.split(" "));
	const isKnown = (word) => known.has(names === "sql" ? word.toLowerCase() : word);
	return merged(pieces(text, COMMENTS[comment], comment === "<!--", isKnown));
}

/** [class or undefined, text] one after another. */
function* pieces(text, comment, hasTags, isKnown) {
	for (let at = 0; at < text.length; ) {
		const here = (pattern) => ((pattern.lastIndex = at), pattern.exec(text)?.[0]);
		let [kind, found] = ["c", here(comment)];
		if (!found && hasTags) [kind, found] = ["k", here(TAG)];
		if (!found) [kind, found] = ["s", here(STRING)];
		if (!found) [kind, found] = ["n", here(NUMBER)];
		if (!found && (found = here(WORD))) kind = isKnown(found) ? "k" : text[at + found.length] === "(" ? "f" : undefined;
		if (!found) [kind, found] = [undefined, String.fromCodePoint(text.codePointAt(at))];
		yield [kind, found];
		at += found.length;
	}
}

function merged(found) {
	const nodes = [];
	let plain = "";
	for (const [kind, text] of found) {
		if (!kind) plain += text;
		else {
			if (plain) nodes.push(plain);
			nodes.push(part(kind, text));
			plain = "";
		}
	}
	return plain ? [...nodes, plain] : nodes;
}

const part = (kind, text) => (kind ? element("span", { class: kind }, text) : text);
