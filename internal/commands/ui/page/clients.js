"use strict";
// Finding a client, its buckets, and the changes that an operator makes to it.

// report says what became of the operator's last change.
function report(text, kind) {
	byId("done").className = kind;
	byId("done").textContent = text;
}

// confirmed asks whether to do what the text says.
function confirmed(text, verb) {
	const dialog = byId("confirm");
	byId("confirm-text").textContent = text;
	byId("confirm-yes").textContent = verb;
	dialog.returnValue = "";
	return new Promise(resolve => {
		dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), {once: true});
		dialog.showModal();
	});
}

// change makes a change to a client, reports it as described, and then shows it.
async function change(path, method, describe, show) {
	report("", "good");
	try {
		report(describe(await call(root + path, method)), "good");
	} catch (error) {
		report(error.message, "bad");
		return;
	}
	await show();
}

// override begins or ends blocks or grants.
function override(list, zone, query, method) {
	return change(list + "/" + encodeURIComponent(zone) + "?" + query, method, answer => answer.overrides.map(o =>
		(method === "DELETE" ? "Ended: " : "Begun: ") + kindOf(o) + " for " + clientText(o) + " in zone " + zone + ".").join(" "), async () => {
		// The list comes with the next call if this one fails.
		await Promise.allSettled([listOverrides(), find()]);
	});
}

// overrideForm has what blocks a client, which exact names, and what grants it events.
function overrideForm(zone, exact, client) {
	const length = el("select", {}, ...[["10m", "10 minutes"], ["1h", "an hour"], ["24h", "a day"], ["720h", "30 days"]].map(([value, text]) => el("option", {value}, text)));
	length.value = "1h";
	const reason = el("input", {autocomplete: "off", maxlength: 200}), events = el("input", {type: "number", min: 1, value: 100});
	const act = (text, list, more, question) => {
		const button = el("button", {type: "button", "aria-label": text + " " + clientText(client) + " in zone " + zone}, text);
		button.addEventListener("click", async () => {
			const query = new URLSearchParams(exact);
			for (const [name, value] of more()) if (value) query.set(name, value);
			if (!question || await confirmed(question(), text)) await override(list, zone, query, "POST");
		});
		return button;
	};
	return el("div", {class: "form"},
		el("label", {}, "Block for", length), act("Block", "blocks", () => [["for", length.value], ["reason", reason.value]],
			() => "Refuse all requests of " + clientText(client) + " in zone " + zone + " for " + length.selectedOptions[0].text + "?"),
		el("label", {}, "Grant events", events), act("Grant", "grants", () => [["events", events.value], ["reason", reason.value]]), el("label", {}, "Reason", reason));
}

// asked is the name that was searched for last. Of several answers to the same question
// only that to the last call is shown: an older one may arrive after it.
let asked = "", searches = 0, lookUps = 0;

const foundColumns = [["Zone"], ["Store"], ["Client", "name"], ["Used", "number"], ["Resets", "number"], ["Blocked or granted"], ["Last refusal", "number"]].map(([text, kind]) => ({text, kind}));

// find shows what there is of the client in all zones, and the clients whose name begins so. Zones with
// nothing of it come last.
async function find() {
	const results = byId("results"), search = ++searches;
	if (!asked) return;
	let answer, known;
	try {
		[answer, known] = await Promise.all([call(root + "clients?" + new URLSearchParams({name: asked})), call(root + "clients?" + new URLSearchParams({prefix: asked}))]);
	} catch (error) {
		if (search === searches) results.replaceChildren(el("p", {class: "bad"}, error.message));
		return;
	}
	if (search === searches) showFound(results, answer, known);
}

function showFound(results, answer, known) {
	const exact = answer.zones.flatMap(z => z.buckets.map(b => {
		const state = (b.servers.find(s => s.state) || {}).state || b.local, error = b.servers.map(s => s.error).find(Boolean);
		return {zone: z.zone, store: z.store, state, error, ...b, isNothing: !state && !error && !b.overrides && !b.last_refused};
	}));
	const idOf = c => [c.zone, c.store, c.client_key].join(" "), shown = new Set(exact.map(idOf));
	const others = known.clients.filter(c => !shown.has(idOf(c))).map(c => ({...c, state: {...c, limit: c.limit || null}}));
	const rows = [...exact.filter(b => !b.isNothing), ...others, ...exact.filter(b => b.isNothing)].map(b => clientRow("results", foundColumns, b, [b.zone, b.store],
		b.state ? usage(b.state) : b.error ? "unknown" : "nothing",
		b.state && b.state.reset ? ends(b.state.reset) : "–",
		(b.overrides || []).map(o => el("div", {class: o.kind === "block" ? "bad" : "good"}, (o.kind === "block" ? "blocked" : kindOf(o)) + atEach(o) + (o.until ? ", ends " + ends(o.until) : ""))),
		ago(b.last_refused)));
	const isNothing = !others.length && exact.every(b => b.isNothing), errors = [...(answer.errors || []), ...(answer.unanswered || []), ...(known.unanswered || [])];
	const made = el("table", {}, el("thead", {}, el("tr", {}, ...foundColumns.map(c => el("th", {scope: "col", class: c.kind}, c.text)))), el("tbody", {}, ...rows));
	refocused(results, () => results.replaceChildren(
		...(isNothing && !errors.length ? [el("p", {}, "Nothing found: no client of this name has a count, and this Caddy knows of none whose name begins so.")] : []),
		...(rows.length ? [made] : [el("p", {}, "No zone has a key that fits this name.")]),
		...(known.more ? [el("p", {class: "quiet"}, "More begin so: write more of the name.")] : []),
		...errors.map(text => el("p", {class: "bad"}, text))));
}

// pathOf is the path of a client's buckets in a zone.
const pathOf = (zone, query) => "buckets/" + encodeURIComponent(zone) + "?" + query;

async function lookUp(zone, query) {
	const found = byId("found"), look = ++lookUps;
	try {
		const answer = await call(root + pathOf(zone, query));
		if (look !== lookUps) return;
		found.replaceChildren(...answer.buckets.map(b => showBucket(answer, b)));
		found.scrollIntoView({block: "nearest"});
		// The next Tab leads to the first button there.
		found.focus({preventScroll: true});
	} catch (error) {
		if (look === lookUps) found.replaceChildren(el("p", {class: "bad"}, error.message));
	}
}

function reset(zone, query) {
	return change(pathOf(zone, query), "DELETE", answer => answer.buckets.map(b =>
		(b.deleted ? "Reset: " : "There was nothing to reset: ") + clientText(b) + " in zone " + zone + ".").join(" "), async () => {
		await Promise.all([lookUp(zone, query), find()]);
	});
}

// closeBucket removes the bucket that is shown, or that is being looked up.
function closeBucket() {
	lookUps++;
	byId("found").replaceChildren();
}

const bucketColumns = ["Server", "Role", "Used", "Remaining", "Reset", "Penalty ends"].map((text, i) => ({text, kind: i > 1 ? "number" : undefined}));

function showBucket(answer, bucket) {
	const former = bucket.former ? bucket.former.servers.map(s => ({...s, role: "former " + s.role})) : [];
	const local = bucket.local ? [{role: "this Caddy alone", state: bucket.local}] : [];
	const rows = [...bucket.servers, ...former, ...local].map(s => {
		const st = s.state, cells = s.error ? [el("td", {class: "bad"}, s.error)] : !st ? ["no bucket"] : [usage(st), amount(st.remaining), ends(st.reset), ends(st.penalty)];
		return [s.address || "memory", s.role || "", ...cells];
	});
	const button = el("button", {type: "button", "aria-label": "Reset " + clientText(bucket) + " in zone " + answer.zone}, "Reset");
	const exact = new URLSearchParams({client_key: bucket.client_key});
	if (answer.store) exact.set("store", answer.store);
	button.addEventListener("click", async () => {
		if (await confirmed("Empty the bucket of " + clientText(bucket) + " in zone " + answer.zone + "? The client then begins anew.", "Reset")) await reset(answer.zone, exact);
	});
	const l = bucket.ledger;
	return el("div", {"data-bucket": bucket.client_key}, el("h3", {}, clientName(bucket)),
		el("p", {class: "quiet"}, ["zone " + answer.zone, "store " + answer.store, bucket.shard && "shard " + bucket.shard,
			l && "this Caddy knows of " + number(l.used) + " used, " + number(l.in_flight) + " in flight, " + number(l.unsent) + " unsent"].filter(Boolean).join(", ")),
		table(bucketColumns, rows), button, overrideForm(answer.zone, exact, bucket));
}

for (const [button, value] of [["confirm-no", ""], ["confirm-yes", "yes"]]) byId(button).addEventListener("click", () => byId("confirm").close(value));

byId("find").addEventListener("submit", event => {
	event.preventDefault();
	asked = byId("name").value.trim();
	report("", "good");
	closeBucket();
	find();
});

document.addEventListener("keydown", event => {
	const found = byId("found"), focused = document.activeElement;
	if (byId("confirm").open) return;
	if (event.key === "/" && !event.ctrlKey && !event.metaKey && !event.altKey && !focused.matches("input, select")) {
		event.preventDefault();
		byId("name").focus();
		byId("name").select();
	} else if (event.key === "Escape" && found.contains(focused) && focused.matches("input, select")) {
		// It leaves the field, and what was typed stays.
		found.focus();
	} else if (event.key === "Escape" && found.contains(focused)) {
		closeBucket();
		found.blur();
		focusButton(opener);
	} else if (event.key === "Escape") {
		focused.blur();
	}
});
