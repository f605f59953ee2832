"use strict";
// The page as a whole: what is asked periodically, what is wrong, the summary and the stores.

const every = 2000;

// showProblems lists the problems and the Caddys that do not answer, and announces those that are new:
// how many seconds a replica is behind changes all the time, and so do how many requests pass unlimited
// and the errors of a server or a Caddy that is away.
function showProblems(status) {
	const texts = [...awayOf(status).map(i => "Caddy " + i.address + " is not part of this: " + i.error + "."),
		...status.problems.map(p => (p.store ? "Store " + p.store + ": " : "") + p.text + (p.addresses ? " (" + p.addresses.join(", ") + ")" : "") + ".")];
	byId("health").hidden = !texts.length;
	byId("problems").replaceChildren(...texts.map(text => el("li", {}, text)));
	say("announced", texts.map(text => text.replace(/[\d.]+ seconds/g, "some time").replace(/(at least )?[\d.]+\/s pass/g, "requests pass").replace(/(calls of it fail|is not part of this|charges wait for shard [^:;]+|not answer all checks and takes|are lost|are not found): .*/, "$1.")).join(" "));
}

// awayOf returns the Caddys that do not answer.
const awayOf = status => (status.instances || []).filter(i => i.error);

function showSummary(status) {
	byId("instances").replaceChildren(...(status.instances || []).map(i => i.error ? el("li", {class: "bad"}, i.address + " does not answer") : i.same ? el("li", {}, i.address + " is the Caddy at " + i.same) : el("li", {},
		[i.name + (i.address ? " (" + i.address + ")" : ""), i.version && "version " + i.version, "up " + duration(i.uptime)].filter(Boolean).join(", "))));
	const troubled = [...[...cards.values()].filter(card => card.trouble.textContent).map(card => card.name), ...awayOf(status).map(i => "Caddy " + i.address)];
	byId("summary").textContent = number(cards.size) + (cards.size === 1 ? " zone" : " zones") + (troubled.length ? ", trouble in " + [...new Set(troubled)].join(", ") : ", none in trouble");
	byId("summary").className = troubled.length ? "bad" : "quiet";
}

const storeColumns = [["Shard"], ["Kind"], ["Server"], ["Role"], ["State"], ["Checks take", "number"], ["Charges take", "number"], ["Lag", "number"]].map(([text, kind]) => ({text, kind}));

function showStore(store) {
	const card = el("div", {class: "card"}, el("h3", {}, store.name));
	const l = store.ledger, facts = [store.module.replace("rate_limit.stores.", "")];
	if (store.buckets !== undefined) facts.push(number(store.buckets) + " buckets");
	if (l) facts.push(number(l.in_flight) + " in flight", number(l.unsent) + " unsent", number(l.uncertain) + " uncertain");
	card.append(el("p", {class: "quiet"}, facts.join(", ")));
	if (!store.shards || !store.shards.length) return card;
	const body = el("tbody");
	for (const shard of store.shards) {
		const kind = shard.kind + (shard.retired ? ", retired" : "");
		if (!shard.found || !(shard.servers || []).length) body.append(row(storeColumns, [shard.name, kind, "–", "–", el("td", {class: "bad"}, "not found")]));
		for (const s of shard.servers || []) {
			const open = Object.entries(s.breakers || {}).filter(([, state]) => state !== "closed").map(([purpose]) => purpose);
			const ok = s.state === "up" && !open.length;
			body.append(row(storeColumns, [shard.name, kind, s.address, s.role,
				el("td", {class: ok ? "good" : "bad"}, (s.state || "").replace("_", " ") + (open.length ? ", no " + open.join(" and ") : "")),
				duration((s.latency_seconds || {}).checks), duration((s.latency_seconds || {}).charges),
				s.lag_seconds === undefined ? "–" : s.lag_seconds.toFixed(1) + " s"], {"data-server": s.address}));
		}
	}
	const made = table(storeColumns, []);
	made.tBodies[0].replaceWith(body);
	card.append(made);
	return card;
}

// shownAt is when the status that is shown arrived.
let shownAt;

function showStatus(status) {
	shownAt = new Date();
	showProblems(status);
	showZones(status);
	showSummary(status);
	// The lists name stores where zones do not say which one it is.
	document.body.classList.toggle("stores", status.zones.some(z => z.rollout || status.zones.some(other => other.name === z.name && other.store !== z.store)));
	byId("stores").replaceChildren(...status.stores.map(showStore));
}

// failures are the errors of the last calls, by their place among those that are repeated. The first
// place is that of the status: without it Caddy is gone.
const failures = [];

function noteFailure(place, message) {
	failures[place] = message;
	const failure = failures.find(Boolean), isGone = Boolean(failures[0]);
	byId("error").hidden = !failure;
	say("error", failure || "");
	say("state", isGone ? "Caddy is gone" : failure ? "Not up to date" : "Live");
	document.body.classList.toggle("gone", isGone);
	byId("as-of").hidden = !isGone;
	byId("as-of").textContent = shownAt ? "What you see is from " + shownAt.toLocaleTimeString() + ", until Caddy answers again." : "Nothing is known of it yet. The page goes on asking.";
}

// repeat makes a call periodically, some milliseconds after each answer. A store that
// does not answer delays the calls that need it, and no other.
async function repeat(place, pause, ask) {
	let wait = pause();
	try {
		await ask();
		noteFailure(place);
	} catch (error) {
		noteFailure(place, error.message);
		wait = every;
	}
	setTimeout(repeat, wait, place, pause, ask);
}

const historyPlace = 4;

// refreshHistory draws the charts anew, between the times at which they are, once for several changes.
let refresh;
function refreshHistory() {
	clearTimeout(refresh);
	refresh = setTimeout(() => loadHistory().then(() => noteFailure(historyPlace), error => noteFailure(historyPlace, error.message)), 30);
}

byId("reveal").addEventListener("click", () => {
	isRevealed = !isRevealed;
	byId("reveal").setAttribute("aria-pressed", isRevealed);
	for (const list of Object.values(lists)) list.draw();
	find();
	closeBucket();
});

repeat(0, () => every, async () => showStatus(await call(root)));
repeat(1, () => every, async () => showTop(await call(root + "top?n=100")));
repeat(2, () => every, listOverrides);
// It looks at all clients.
repeat(3, () => 5 * every, async () => showNear(await call(root + "near?n=100")));
// A moment after the end of each step of ten seconds; of five minutes, which is long, within one.
repeat(historyPlace, () => range === "1h" ? 10500 - Date.now() % 10000 : 60000, loadHistory);
