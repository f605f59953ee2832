"use strict";
// What all parts of the page use: elements, numbers and times as text, clients as text, calls.

const root = "/rate_limit/";
const byId = id => document.getElementById(id);
const el = (name, attributes = {}, ...children) => {
	const e = document.createElement(name);
	for (const [k, v] of Object.entries(attributes)) if (v !== undefined) e.setAttribute(k, v);
	e.append(...children);
	return e;
};
const number = n => n.toLocaleString();
const rate = n => n >= 100 ? number(Math.round(n)) : n.toFixed(1);
const units = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"], [1e-3, "ms"], [1e-6, "µs"]];
const duration = s => {
	if (!(s > 0)) return "–";
	const [size, unit] = units.find(([size]) => s >= size) || units.at(-1);
	return (s / size >= 100 ? number(Math.round(s / size)) : +(s / size).toPrecision(2)) + " " + unit;
};
const ends = at => !at ? "–" : at > Date.now() / 1000 ? "in " + duration(at - Date.now() / 1000) : "now";
// Some instants are whole seconds.
const ago = at => at ? duration(Math.max(1, Date.now() / 1000 - at)) + " ago" : "–";
// grouped groups the digits of a number that is a text, such as events, which may be a placeholder.
const grouped = text => /^\d+$/.test(text) ? number(+text) : text;

// amount is the text of a number that may be unknown: a limit that depends on the request is, unless
// this Caddy has had one of the client.
const amount = n => n === null ? "unknown" : number(n);
const usedOf = state => amount(state.used) + " of " + amount(state.limit);
// share is how much of a limit is used, for sorting; usage shows it with a bar.
const share = state => state.limit ? state.used / state.limit : 0;
const usage = state => state.limit && state.used !== null
	? [usedOf(state), el("meter", {min: 0, max: state.limit, high: 0.8 * state.limit, optimum: 0, value: Math.min(state.used, state.limit), "aria-label": Math.round(100 * share(state)) + "% used"})]
	: [usedOf(state)];

// say changes the text of a live region. Screen readers read whatever is written there,
// the same text included.
function say(id, text) {
	if (byId(id).textContent !== text) byId(id).textContent = text;
}

async function call(path, method = "GET") {
	let response, body;
	try {
		response = await fetch(path, {method, headers: {"X-Rate-Limit-Page": "1"}, cache: "no-store"});
	} catch {
		throw new Error("The page's server does not answer. Is `caddy rate-limit ui` still running?");
	}
	try {
		body = await response.json();
	} catch {
		throw new Error("Caddy's answer cannot be read (status " + response.status + ").");
	}
	if (!response.ok) throw new Error(body.error || "Caddy answered with status " + response.status + ".");
	return body;
}

// visible escapes what cannot be seen, or changes the order of what can, as the commands
// do: clients choose their keys.
const visible = text => {
	const hidden = /(?! )[\p{C}\p{Z}]/gu;
	if (!hidden.test(text)) return text;
	return text.replace(/[\\"]/g, "\\$&").replace(hidden, c => {
		const code = c.codePointAt(0), [letter, digits] = code < 0x80 ? ["x", 2] : code < 0x10000 ? ["u", 4] : ["U", 8];
		return "\\" + letter + code.toString(16).padStart(digits, "0");
	});
};

// quoted is text as one argument of a command, so that it shows where a value ends.
// An escape that came after the quotes could open them.
const quoted = text => {
	text = visible(text);
	return /^[\w.:/@%+{}-]+$/.test(text) && !/{.*\.\./.test(text) ? text : "'" + text.replaceAll("'", "'\\''") + "'";
};

// isRevealed: credentials are shown whole.
let isRevealed = false;
const isCredential = placeholder => /auth|cookie|token|key|secret|passw|session|jwt|bearer|credential/i.test(placeholder);

// shortened leaves of a credential what tells it from others. None is as short as what is left whole.
const shortened = text => {
	const all = [...text];
	if (isRevealed || all.length <= 6) return text;
	return all.slice(0, Math.min(4, Math.floor(all.length / 3))).join("") + "…" + (all.length >= 12 ? all.slice(-2).join("") : "");
};

// A client is the text of the zone's key that has it, and its values. Without these it is
// the client key. A value that a command would take for an option comes after "--".
const clientWords = c => {
	if (!c.template && !c.values) return [c.unknown ? c.client_key : shortened(c.client_key)];
	const placeholders = [...new Set((c.template || "").match(/{[^}]*}/g) || [])];
	const values = c.values || [];
	return values.map((value, i) => isCredential(placeholders.length === values.length ? placeholders[i] : c.template || "") ? shortened(value) : value);
};
const beforeOption = c => (c.template || c.values) && [c.template || "", ...clientWords(c)].some(word => word.startsWith("-")) ? "-- " : "";
const clientText = c => beforeOption(c) + [...(c.template ? [c.template] : []), ...clientWords(c)].map(quoted).join(" ");
const clientName = c => {
	const name = el("span", {}, beforeOption(c));
	if (c.template) name.append(el("span", {class: "template"}, quoted(c.template)));
	clientWords(c).forEach((word, i) => name.append(i || c.template ? " " : "", el("bdi", {}, quoted(word))));
	if (c.note) name.append(el("span", {class: "note"}, " (" + c.note + ")"));
	return name;
};

function focusButton(client, within = document) {
	for (const b of within.querySelectorAll("button")) if (b.dataset.client === client) b.focus();
}

// refocused runs change, which replaces the children of body, and leaves the focus on
// the button about the same client.
function refocused(body, change) {
	const focused = document.activeElement && body.contains(document.activeElement) && document.activeElement.dataset.client;
	change();
	if (focused) focusButton(focused, body);
}

// table is a table with columns of {text, kind}. On a phone a cell shows the text of its column.
const table = (columns, rows) => el("table", {}, el("thead", {}, el("tr", {}, ...columns.map(c => el("th", {scope: "col", class: c.kind}, c.text)))),
	el("tbody", {}, ...rows.map(cells => row(columns, cells))));
const row = (columns, cells, attributes = {}) => el("tr", attributes, ...cells.map((cell, i) => {
	const td = cell instanceof HTMLTableCellElement ? cell : el("td", {}, ...[cell].flat());
	if (columns[i].kind) td.classList.add(...columns[i].kind.split(" "));
	td.dataset.label = columns[i].text;
	return td;
}));

// opener is the button that led to the bucket that is shown.
let opener = "";

// clientRow is a row about a client in a zone, in a list of that name: cells before the client, and
// others after it. It leads to the client's bucket, unless the client key is unknown.
function clientRow(list, columns, c, before, ...after) {
	if (c.unknown) return row(columns, [...before, clientName(c), ...after]);
	const button = el("button", {type: "button", class: "client", "data-client": [list, c.zone, c.store, c.client_key].join(" "),
		"aria-label": "Look up " + clientText(c) + " in zone " + c.zone}, clientName(c));
	const made = row(columns, [...before, button, ...after], {class: "opens"});
	made.addEventListener("click", () => {
		opener = button.dataset.client;
		lookUp(c.zone, new URLSearchParams({client_key: c.client_key, store: c.store}));
	});
	return made;
}
