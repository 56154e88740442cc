// The API's description, /openapi.json, as a page: operations by group, their fields, and a form to try each.

import { fetched, key, request } from "./api.js";
import { byId, element } from "./dom.js";

const MAX_DEPTH = 6;
const EXAMPLES = { messages: [{ role: "user", content: "Hello!" }], prompt: "Hello", input: "Hello", max_tokens: 64 };
let schemas = {};

/** The schema that a reference leads to, or itself. */
const resolved = (schema) => (schema?.$ref ? schemas[schema.$ref.split("/").at(-1)] : schema) ?? {};

/** A schema in one line. */
function typeOf(schema) {
	if (schema.$ref) return schema.$ref.split("/").at(-1);
	const choices = schema.anyOf ?? schema.oneOf;
	if (choices) return choices.map(typeOf).join(" or ");
	if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" or ");
	if (schema.type === "array") return `list of ${typeOf(schema.items ?? {})}`;
	if (schema.type === "object" && schema.additionalProperties?.$ref) return `map to ${typeOf(schema.additionalProperties)}`;
	return [schema.type ?? "anything", boundsOf(schema)].filter(Boolean).join(" ");
}

function boundsOf({ minimum, maximum, exclusiveMinimum, maxLength, maxItems }) {
	const least = minimum ?? (exclusiveMinimum === undefined ? undefined : `>${exclusiveMinimum}`);
	const greatest = maximum > Number.MAX_SAFE_INTEGER ? undefined : maximum;
	const bounds = least === undefined && greatest === undefined ? "" : `(${least ?? "…"} to ${greatest ?? "…"})`;
	const most = maxLength ?? maxItems;
	return most === undefined ? bounds : `${bounds}(at most ${most})`;
}

/** The objects with fields that a schema mentions. */
function objectsIn(schema) {
	const inner = [...(schema.anyOf ?? schema.oneOf ?? []), schema.items, schema.additionalProperties].filter(Boolean);
	const own = schema.$ref && resolved(schema).properties ? [schema] : [];
	return [...own, ...inner.flatMap(objectsIn)];
}

/** A table of an object's fields; those that are objects open on demand. */
function fieldTable(schema, depth = 0) {
	const { properties = {}, required = [] } = resolved(schema);
	const names = [...required, ...Object.keys(properties).filter((name) => !required.includes(name))];
	const rows = names.map((name) => {
		const field = properties[name];
		const left = element("th", { scope: "row" }, name, required.includes(name) ? element("em", {}, " required") : "");
		const right = element("td", {}, typeOf(field));
		if (field.default != null && typeof field.default !== "object") right.append(`, default ${JSON.stringify(field.default)}`);
		if (depth < MAX_DEPTH) right.append(...objectsIn(field).map((object) => lazily(typeOf(object), () => fieldTable(object, depth + 1))));
		return element("tr", {}, left, right);
	});
	return element("table", { class: "fields" }, element("tbody", {}, ...rows));
}

/** A folded part whose content is made when it is first opened. */
function lazily(title, make) {
	const details = element("details", {}, element("summary", {}, title));
	details.addEventListener("toggle", () => details.append(make()), { once: true });
	return details;
}

function bodyOf(operation) {
	return operation.requestBody?.content["application/json"].schema;
}

/** A body to begin with: what is required, and what everybody sets. */
function exampleOf(schema) {
	const { properties = {}, required = [], anyOf } = resolved(schema);
	const wanted = [...required, ...(anyOf?.[0].required ?? []), ...("max_tokens" in properties ? ["max_tokens"] : [])];
	return Object.fromEntries(wanted.map((name) => [name, EXAMPLES[name] ?? (properties[name].type === "array" ? [] : "")]));
}

/** The form: parameters and body in, the answer as it comes out. */
function tryForm(path, method, operation) {
	const parameters = (operation.parameters ?? []).map(({ name }) => element("input", { name, "aria-label": name, placeholder: name }));
	const query = element("input", { name: "query", "aria-label": "Query", placeholder: "query, as a=1&b=2" });
	const body = bodyOf(operation) && element("textarea", { rows: 6, "aria-label": "Body", spellcheck: "false" });
	if (body) body.value = JSON.stringify(exampleOf(bodyOf(operation)), null, 2);
	const answer = element("pre", { class: "answer", tabindex: "0", hidden: true });
	const form = element("form", { class: "try" }, ...parameters, query, body ?? "", element("button", {}, "Send"), answer);
	form.addEventListener("submit", async (event) => {
		event.preventDefault();
		const filled = path.replace(/{(\w+)}/g, (_, name) => encodeURIComponent(form.elements[name].value));
		const url = filled.slice(1) + (query.value && `?${query.value}`);
		answer.hidden = false;
		answer.textContent = "…";
		try {
			await send(url, method.toUpperCase(), body?.value, answer);
		} catch (error) {
			answer.textContent = String(error);
		}
	});
	return form;
}

async function send(url, method, body, answer) {
	const headers = body ? { "Content-Type": "application/json" } : {};
	const began = performance.now();
	const response = await fetched(url, { method, headers, body });
	const head = `${response.status} ${response.statusText}`;
	const reader = response.body?.pipeThrough(new TextDecoderStream()).getReader();
	answer.textContent = `${head}\n\n`;
	for (let part; reader && !(part = await reader.read()).done; ) answer.append(part.value);
	const took = `${head}, ${Math.round(performance.now() - began)} ms`;
	answer.textContent = took + indented(answer.textContent.slice(head.length));
}

function indented(text) {
	try {
		return `\n\n${JSON.stringify(JSON.parse(text), null, 2)}`;
	} catch {
		return text;
	}
}

function operationNode(path, method, operation) {
	const parts = [element("p", {}, operation.description)];
	const schema = bodyOf(operation);
	if (schema) parts.push(element("h3", {}, `Body: ${typeOf(schema)}`), fieldTable(schema));
	for (const [type, { schema: answer }] of Object.entries(operation.responses["200"].content ?? {})) {
		parts.push(element("h3", {}, `Answer: ${typeOf(answer)} as ${type}`), ...(answer.$ref ? [lazily("Fields", () => fieldTable(answer))] : []));
	}
	const summary = element("summary", {}, element("strong", { class: `method ${method}` }, method.toUpperCase()), element("code", {}, path), element("span", {}, operation.summary));
	const node = element("details", { class: "operation" }, summary);
	node.dataset.text = `${method} ${path} ${operation.summary} ${operation.description}`.toLowerCase();
	node.addEventListener("toggle", () => node.append(element("div", {}, ...parts, tryForm(path, method, operation))), { once: true });
	return node;
}

function applyFilter() {
	const wanted = byId("filter").value.trim().toLowerCase();
	for (const node of document.querySelectorAll(".operation")) node.hidden = !node.dataset.text.includes(wanted);
	for (const group of document.querySelectorAll("section")) group.hidden = !group.querySelector(".operation:not([hidden])");
}

async function load() {
	try {
		const { info, paths, components } = await (await request("openapi.json")).json();
		schemas = components.schemas;
		const groups = Map.groupBy(
			Object.entries(paths).flatMap(([path, methods]) => Object.entries(methods).map(([method, operation]) => ({ path, method, operation }))),
			({ operation }) => operation.tags[0],
		);
		byId("groups").replaceChildren(
			...[...groups].map(([name, entries]) =>
				element("section", {}, element("h2", {}, name), ...entries.map(({ path, method, operation }) => operationNode(path, method, operation))),
			),
		);
		byId("state").textContent = `${info.title} ${info.version}`;
		applyFilter();
	} catch (error) {
		byId("state").textContent = error.status === 401 ? "This server asks for an API key: type it above." : error.message;
		if (error.status === 401) byId("key").focus();
	}
}

byId("filter").addEventListener("input", applyFilter);
byId("key").value = key.get();
byId("access").addEventListener("submit", (event) => event.preventDefault());
byId("key").addEventListener("change", () => {
	key.set(byId("key").value.trim());
	load();
});
load();
