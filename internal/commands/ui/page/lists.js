"use strict";
// The lists of clients, which can be sorted, filtered and paged, and what is in them.

const pageSize = 10;

// List shows rows in the element with its name. A column has a text, perhaps a kind, and value, by which
// rows are sorted. rowOf makes the row of one.
class List {
	constructor(name, columns, rowOf, sort) {
		Object.assign(this, {name, columns, rowOf, sort, rows: [], page: 0, isUp: false, filter: ""});
		const place = document.querySelector("[data-list=" + name + "]");
		this.input = el("input", {type: "search", autocomplete: "off", spellcheck: "false"});
		this.input.addEventListener("input", () => {
			[this.filter, this.page] = [this.input.value.trim().toLowerCase(), 0];
			this.draw();
		});
		this.heads = columns.map((c, i) => {
			const button = el("button", {type: "button", class: "sort"}, c.text);
			button.addEventListener("click", () => {
				[this.isUp, this.sort, this.page] = [this.sort === i ? !this.isUp : !(c.kind || "").includes("number"), i, 0];
				this.draw();
			});
			return el("th", {scope: "col", class: c.kind}, c.value ? button : c.text);
		});
		this.body = el("tbody", {id: name});
		this.note = el("p", {id: name + "-note", class: "quiet"});
		this.pager = el("div", {class: "pager"});
		this.shown = el("span", {role: "status"});
		const turn = (text, by) => {
			const button = el("button", {type: "button", "aria-label": text + " of " + byId(name + "-title").textContent}, text);
			button.addEventListener("click", () => {
				this.page += by;
				this.draw();
			});
			return button;
		};
		this.before = turn("Previous page", -1);
		this.after = turn("Next page", 1);
		this.pager.append(this.before, this.shown, this.after);
		this.tools = el("label", {}, "Rows that have this text", this.input);
		place.append(this.tools, el("table", {}, el("thead", {}, el("tr", {}, ...this.heads)), this.body), this.pager, this.note);
		this.draw();
	}

	show(rows, note) {
		[this.rows, this.note.textContent] = [rows, note];
		this.draw();
	}

	draw() {
		const {value} = this.columns[this.sort], compare = (a, b) => a < b ? -1 : a > b ? 1 : 0;
		// The filter sees what the rows show.
		const made = this.rows.map(r => ({of: value(r), row: this.rowOf(r, this.columns)}))
			.filter(r => !this.filter || r.row.textContent.toLowerCase().includes(this.filter))
			.sort((a, b) => this.isUp ? compare(a.of, b.of) : compare(b.of, a.of)).map(r => r.row);
		const pages = Math.max(1, Math.ceil(made.length / pageSize)), first = pageSize * (this.page = Math.min(this.page, pages - 1));
		// The rows are new; the focus stays on the row of the same client.
		refocused(this.body, () => this.body.replaceChildren(...made.slice(first, first + pageSize)));
		this.heads.forEach((th, i) => th.setAttribute("aria-sort", i !== this.sort ? "none" : this.isUp ? "ascending" : "descending"));
		// A short list needs no tools, unless they are in use.
		this.tools.hidden = this.rows.length <= pageSize && !this.filter;
		this.pager.hidden = pages === 1 && !this.filter;
		this.before.disabled = this.page === 0;
		this.after.disabled = this.page === pages - 1;
		const text = made.length ? number(first + 1) + "–" + number(Math.min(first + pageSize, made.length)) + " of " + number(made.length) : "Nothing found";
		if (this.shown.textContent !== text) this.shown.textContent = text;
	}
}

const column = (text, value, kind) => ({text, value, kind});
const zoneColumn = column("Zone", c => c.zone), storeColumn = column("Store", c => c.store, "store"), clientColumn = column("Client", clientText, "name");

// byEach says what each of several Caddys has to do with a row.
const byEach = (before, parts, textOf) => parts && parts.length ? [el("span", {class: "quiet each"}, before + parts.map(p => p.address + " " + textOf(p)).join(", "))] : [];

const lists = {
	overrides: new List("overrides", [zoneColumn, storeColumn, clientColumn, column("Kind", o => o.kind), column("Ends", o => o.until || Infinity, "number"),
		column("Reason", o => o.reason || "", "name"), column("By", o => o.by || ""), column("Change")], overrideRow, 4),
	near: new List("near", [zoneColumn, storeColumn, clientColumn, column("Used", share, "number"), column("Resets", c => c.reset || 0, "number")],
		(c, columns) => clientRow("near", columns, c, [c.zone, c.store],
			[...usage(c), ...(c.address ? [el("span", {class: "quiet each"}, "at " + c.address)] : byEach("seen by ", c.seen, s => number(s.used)))], ends(c.reset)), 3),
	top: new List("top", [zoneColumn, storeColumn, clientColumn, column("Refused", c => c.count, "number"), column("Last refusal", c => c.last_refused || 0, "number")],
		(c, columns) => clientRow("top", columns, c, [c.zone, c.store], [number(c.count), ...byEach("by ", c.shares, s => Math.round(100 * s.count / c.count) + "%")], ago(c.last_refused)), 3),
};

// missingOf says which of several Caddys are not part of an answer. The page says above why.
const missingOf = answer => (answer.unanswered || []).map(e => "Not part of this: " + e.split(": ")[0] + ". ").join("");

function showTop(answer) {
	const rows = answer.zones.flatMap(z => z.refused.map(c => ({zone: z.zone, ...c})));
	const covered = duration(Math.max(0, ...answer.zones.map(z => z.since)));
	lists.top.show(rows, missingOf(answer) + (rows.length ? "In the last " + covered + "." : "Nobody was refused in the last " + covered + "."));
}

function showNear(answer) {
	const rows = answer.zones.flatMap(z => z.clients.map(c => ({zone: z.zone, ...c}))), full = answer.zones.filter(z => z.full);
	const unlisted = [...new Set(answer.zones.flatMap(z => z.unlisted_stores || []))];
	lists.near.show(rows, missingOf(answer) + (rows.length || unlisted.length ? "" : "Nobody is near a limit, as far as is known here. ") +
		unlisted.map(name => "Store " + name + " cannot tell who is near a limit. ").join("") +
		(rows.some(c => c.seen) ? "A shared store has one count: what each Caddy saw last is known, how much each has admitted is not. " : "") +
		full.map(z => z.zone + ": " + number(z.full) + (z.full === 1 ? " client at its limit. " : " clients at their limit. ")).join(""));
}

// asks counts the calls for overrides. Of several answers only that to the last call is shown: an older
// one may arrive after it.
let asks = 0;

async function listOverrides() {
	const ask = ++asks, answer = await call(root + "overrides");
	if (ask !== asks) return;
	lists.overrides.show(answer.overrides, missingOf(answer) + (answer.errors || []).map(e => "Not all are known: " + e + ". ").join("") +
		(answer.overrides.length || answer.errors || answer.unanswered ? "" : "Nobody is blocked, and nothing was set."));
}

const kindOf = o => {
	const events = o.events < 0 ? "unlimited" : number(o.events || 0);
	switch (o.kind) {
	case "grant": return o.events ? "grant of " + events : o.kind;
	case "limit": return o.events ? "limit of " + events : o.kind;
	case "zone":
		return "zone: " + [o.events ? "events " + events : "", o.enforce != null ? "enforce " + o.enforce + "%" : "", o.rollout != null ? "rollout " + o.rollout + "%" : ""].filter(text => text).join(", ");
	default: return o.kind;
	}
};

// atEach says which of several Caddys have an override, if not all have.
const atEach = o => o.addresses ? " at " + o.addresses.join(", ") : "";

function overrideRow(o, columns) {
	const button = el("button", {type: "button", "data-client": "end " + o.kind + " " + o.zone + " " + o.store + " " + o.client_key, "aria-label": "End the " + o.kind + " of " + clientText(o) + " in zone " + o.zone}, "End");
	button.addEventListener("click", event => {
		event.stopPropagation();
		override(o.kind + "s", o.zone, new URLSearchParams(o.kind === "zone" ? {store: o.store} : {client_key: o.client_key, store: o.store}), "DELETE");
	});
	return clientRow("overrides " + o.kind, columns, {...o, unknown: o.unknown || o.kind === "zone"}, [o.zone, o.store],
		kindOf(o) + atEach(o), o.until ? ends(o.until) : "–", o.reason || "", o.by || "", button);
}
