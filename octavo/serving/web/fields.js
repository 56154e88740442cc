// Everything a reader may set for a request, as a table: the names are those of the API.

/** Kinds of values: how one is written, and how it is read. A reader throws an Error whose message says what is wrong. */
export const KINDS = {
	text: (text) => text,
	number: (text) => Number(text),
	whole: (text) => Number(text),
	choice: (text) => text,
	flag: (text) => text === "true",
	lines: (text) => text.split("\n").filter(Boolean),
	ids: (text) => text.split(/[\s,]+/).filter(Boolean).map(wholeNumber),
	object: (text) => parsed(text, (value) => value && typeof value === "object" && !Array.isArray(value), "An object in JSON: {…}."),
	list: (text) => parsed(text, Array.isArray, "A list in JSON: […]."),
};

const number = (name, label, { min, max, step = 0.05, ...rest } = {}) => ({ name, label, kind: "number", min, max, step, ...rest });
const whole = (name, label, { min = 0, ...rest } = {}) => ({ name, label, kind: "whole", min, step: 1, ...rest });
const flag = (name, label, rest) => ({ name, label, kind: "flag", ...rest });
const other = (kind) => (name, label, hint) => ({ name, label, kind, hint });
const [lines, ids, object, list, text] = ["lines", "ids", "object", "list", "text"].map(other);

/** Titles, and the fields under them; `empty` says what holds without a value where the server does not. */
export const GROUPS = [
	["Sampling", [
		number("temperature", "Temperature", { min: 0, max: 2 }),
		number("top_p", "Top p", { min: 0.01, max: 1, step: 0.01 }),
		whole("top_k", "Top k", { empty: "0" }),
		number("min_p", "Min p", { min: 0, max: 1, step: 0.01 }),
		number("repetition_penalty", "Repetition penalty", { min: 0.1, max: 2 }),
		number("presence_penalty", "Presence penalty", { min: -2, max: 2 }),
		number("frequency_penalty", "Frequency penalty", { min: -2, max: 2 }),
		whole("seed", "Seed", { empty: "random" }),
	]],
	["Length and end", [
		whole("max_tokens", "Max tokens", { min: 1, empty: "no limit" }),
		whole("min_tokens", "Fewest tokens"),
		lines("stop", "Stop at", "One text per line"),
		ids("stop_token_ids", "Stop at token ids", "2, 7"),
		flag("ignore_eos", "Ignore the end of text"),
		flag("include_stop_str_in_output", "Show the text it stopped at"),
		number("timeout", "Seconds at most", { min: 0.1, step: 0.1, empty: "no limit" }),
		object("repetition_detection", "Stop at repetitions", '{"max_pattern_size": 20, "min_count": 4}'),
	]],
	["Form of the answer", [
		object("json_schema", "JSON schema", '{"type": "object", "properties": {…}}'),
		flag("json_object", "Any JSON object"),
		text("regex", "Regular expression", "[0-9]{4}"),
		lines("choice", "One of these", "One text per line"),
		text("grammar", "Grammar (EBNF)", 'root ::= "yes" | "no"'),
	]],
	["Tokens", [
		{ ...flag("logprobs", "Record token probabilities"), note: "Click on an answer's bars to see them." },
		whole("top_logprobs", "Alternatives per token", { max: 20, empty: "5" }),
		lines("bad_words", "Words to avoid", "One per line"),
		object("logit_bias", "Bias by token id", '{"50": -100}'),
		ids("allowed_token_ids", "Only these token ids", "1, 5, 9"),
		ids("forbidden_token_ids", "Not these token ids", "1, 5, 9"),
		flag("skip_special_tokens", "Hide special tokens", { isOn: true }),
		flag("spaces_between_special_tokens", "Spaces between special tokens", { isOn: true }),
	]],
	["Thinking and tools", [
		{ name: "reasoning_effort", label: "Effort", kind: "choice", choices: ["none", "minimal", "low", "medium", "high", "xhigh", "max"] },
		whole("thinking_token_budget", "Thinking budget", { empty: "no limit" }),
		object("chat_template_kwargs", "Variables of the template", '{"enable_thinking": false}'),
		list("tools", "Tools", '[{"type": "function", "function": {"name": "…"}}]'),
		{ name: "tool_choice", label: "Tool choice", kind: "choice", choices: ["auto", "none", "required"] },
	]],
	["Search and order", [
		flag("use_beam_search", "Beam search"),
		whole("best_of", "Beams, or best of", { min: 1, empty: "1" }),
		number("length_penalty", "Length penalty", { empty: "1" }),
		whole("priority", "Priority", { min: -(2 ** 31), empty: "0" }),
		object("extra", "Any other fields", '{"cache_salt": "mine"}'),
	]],
];
export const FIELDS = GROUPS.flatMap(([, fields]) => fields);

/** Fields of a request from the values of the page: some have another form there. */
export function requestFields({ json_schema, json_object, regex, choice, grammar, logprobs, top_logprobs, tools, tool_choice, extra, ...same }) {
	const forms = { regex, choice, grammar };
	const structured_outputs = Object.fromEntries(Object.entries(forms).filter(([, value]) => value !== undefined));
	return {
		...same,
		...(json_object && { response_format: { type: "json_object" } }),
		...(json_schema && { response_format: { type: "json_schema", json_schema: { name: "answer", schema: json_schema } } }),
		...(Object.keys(structured_outputs).length && { structured_outputs }),
		...(logprobs && { logprobs: true, top_logprobs: top_logprobs ?? 5 }),
		...(tools?.length && { tools, ...(tool_choice && { tool_choice }) }),
		...extra,
	};
}

function wholeNumber(text) {
	if (!/^\d{1,15}$/.test(text)) throw new Error("Whole numbers, with commas between them.");
	return Number(text);
}

function parsed(text, isFine, words) {
	let value;
	try {
		value = JSON.parse(text);
	} catch (error) {
		throw new Error(`${words} ${error.message}`);
	}
	if (!isFine(value)) throw new Error(words);
	return value;
}
