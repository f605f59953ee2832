"use strict";
// The zones: what happens in each now, and charts of what has happened.

// series are what happens to requests: the decisions that each adds up, its name in histories, and its
// words. Requests that pass though the client is over its limit, or because the store cannot answer, are
// not allowed ones.
const series = {
	allowed: {of: ["allowed"], in: "allowed", text: "allowed"},
	would: {of: ["would_refuse"], in: "would_refuse", text: "would be refused", dash: [2, 2]},
	unchecked: {of: ["error_allowed"], in: "unchecked", text: "pass unlimited (on_error allow)", dash: [8, 2, 2, 2]},
	refused: {of: ["refused", "error_refused", "blocked"], in: "refused", text: "refused", dash: [5, 2]},
	waited: {of: [], in: "waited", text: "held by max_wait", dash: [1, 3]},
};
const kinds = Object.keys(series), counted = kinds.filter(kind => series[kind].of.length), isUsual = kind => kind === "allowed" || kind === "refused";
const idOf = zone => zone.name + " " + zone.store;

// troubles are the words for the kinds of problems of a zone.
const troubles = {
	unchecked: "passes unlimited", disagreement: "defined differently", proxy_address: "a proxy's clients share a bucket", one_key: "one key for nearly all",
	empty_key: "empty keys", evicted: "forgets clients", idle_zone: "decides about nothing", doubtful_key: "doubtful key", doubtful_config: "may limit nothing",
};
const troubleOf = p => p && (p.zone ? troubles[p.kind] || "has a problem" : "its store has problems");

// effective is what holds of a zone: what operators have set, and in parentheses what the config says; or, if
// Caddys differ, what the config says, and in parentheses what was set where.
function effective(zone) {
	const percent = n => n == null ? undefined : n + "%", eventsOf = n => n < 0 ? "unlimited" : n > 0 ? number(n) : undefined;
	const either = (of, config) => {
		const now = of(zone.rule || {}), others = (zone.shares || []).filter(s => s.rule && of(s.rule) !== undefined);
		return (now === undefined ? config : now + " (set; config " + config + ")") + others.map(s => " (" + of(s.rule) + " at " + s.address + ")").join("");
	};
	return {
		events: either(rule => eventsOf(rule.events), grouped(zone.events)),
		enforced: either(rule => percent(rule.enforce), percent(zone.enforce)),
		moved: zone.rollout && zone.rollout.by ? "as " + zone.rollout.by : zone.rollout && either(rule => percent(rule.rollout), percent(zone.rollout.percent)),
	};
}

const countsOf = decisions => Object.fromEntries(counted.map(kind => [kind, series[kind].of.reduce((sum, decision) => sum + decisions[decision], 0)]));

// cards are the zones that are shown, by zone and store. Each has its element, chart, and the last two
// counts of each Caddy, by which it says what happens now.
const cards = new Map();
// openAtFirst is how many zones are open until the operator opens or closes one.
const openAtFirst = 6;

class Card {
	constructor(zone) {
		this.chartAt = el("div", {class: "chart", role: "img"});
		this.about = el("p", {class: "quiet"});
		this.last = el("p", {class: "quiet"});
		this.shares = el("ul", {class: "quiet shares", "aria-label": "Decisions of each Caddy"});
		this.trouble = el("span", {class: "bad trouble"});
		this.now = el("span", {class: "key"}, ...counted.map(kind => el("span", {class: "series " + kind})));
		this.element = el("details", {class: "card", "data-zone": zone.name, "data-store": zone.store},
			el("summary", {}, el("h3", {}, zone.name), this.trouble, this.now), this.about, this.chartAt, this.last, this.shares);
		this.element.addEventListener("toggle", () => {
			if (this.element.open) refreshHistory();
		});
		new ResizeObserver(() => this.chart && this.fit()).observe(this.chartAt);
	}

	// note counts what each Caddy has decided until the instant at. The rates are of those alone that were
	// there at the last instant as well and have not begun anew since, as they do in a restart.
	note(zone, at) {
		if (at === this.at) return;
		const shares = zone.shares || [{address: "", decisions: zone.decisions}], now = new Map(shares.map(s => [s.address, countsOf(s.decisions)]));
		this.rates = Object.fromEntries(counted.map(kind => [kind, 0]));
		for (const [address, counts] of now) {
			const before = this.counts && this.counts.get(address);
			if (!before || counted.some(kind => counts[kind] < before[kind])) continue;
			for (const kind of counted) this.rates[kind] += (counts[kind] - before[kind]) / ((at - this.at) / 1000);
		}
		[this.counts, this.at] = [now, at];
	}

	show(zone, problems) {
		const {events, enforced, moved} = effective(zone), now = this.rates;
		this.name = zone.name;
		this.about.textContent = events + (zone.algorithm === "concurrency" ? " at the same time" : " per " + (zone.calendar || duration(zone.window))) +
			", " + zone.algorithm.replace("_", " ") + ", store " + zone.store + (moved ? ", " + moved + " in " + zone.rollout.store : "") + (enforced !== "100%" ? ", enforced for " + enforced : "");
		for (const kind of counted) {
			const e = this.now.querySelector("." + kind);
			e.textContent = rate(now[kind]) + "/s " + series[kind].text;
			// What is not usual is shown while there is some of it.
			e.hidden = !isUsual(kind) && !now[kind];
		}
		this.last.textContent = zone.last_refused ? "last refusal " + ago(zone.last_refused) : "no refusal";
		this.shares.replaceChildren(...(zone.shares || []).map(s => {
			const counts = countsOf(s.decisions);
			return el("li", {}, s.address + ": " + counted.filter(kind => isUsual(kind) || counts[kind]).map(kind => number(counts[kind]) + " " + series[kind].text).join(", "));
		}));
		// The store's problem is one of all its zones.
		const own = problems.filter(p => p.zone ? p.zone === zone.name : p.store === zone.store || zone.rollout && p.store === zone.rollout.store);
		this.trouble.textContent = now.unchecked ? troubles.unchecked : troubleOf(own.find(p => p.zone) || own[0]) || "";
	}

	draw(history, zone) {
		const latency = zone.store_latency.map(s => s === null ? null : s * 1000);
		const times = latency.map((_, i) => history.start + i * history.step), last = times.length - 1;
		// The last step may not be over.
		this.partial = history.partial ? last : -1;
		const lasts = i => i === this.partial ? history.partial : history.step;
		const perSecond = Object.fromEntries(kinds.map(kind => [kind, zone[series[kind].in].map((n, i) => n === null ? null : n / lasts(i))]));
		const has = kind => isUsual(kind) || perSecond[kind].some(n => n > 0), hasLatency = latency.some(n => n !== null);
		if (!this.chart) this.chart = new uPlot(chartOptions(this.chartAt.clientWidth, i => i === this.partial), null, this.chartAt);
		this.chart.batch(() => {
			this.chart.setData([times, ...kinds.map(kind => perSecond[kind]), latency]);
			kinds.forEach((kind, i) => this.chart.setSeries(i + 1, {show: has(kind)}));
			this.chart.setSeries(kinds.length + 1, {show: hasLatency});
		});
		this.chart.root.querySelectorAll(".u-legend .u-series").forEach((e, i) => e.hidden = i > 0 && (i > kinds.length ? !hasLatency : !has(kinds[i - 1])));
		const most = list => Math.max(0, ...list), sum = list => list.reduce((sum, n) => sum + n, 0);
		this.chartAt.setAttribute("aria-label", "Requests of zone " + zone.zone + " in the last " + rangeTexts[history.range] + ": " +
			kinds.filter(has).map(kind => number(sum(zone[series[kind].in])) + " " + series[kind].text + ", at most " + rate(most(perSecond[kind])) + " a second").join("; ") +
			(hasLatency ? "; calls of the store took at most " + duration(most(latency) / 1000) : ""));
	}

	fit() {
		if (this.chartAt.clientWidth) this.chart.setSize({width: this.chartAt.clientWidth, height: chartHeight});
	}
}

const chartHeight = 200;
const rangeTexts = {"1h": "hour", "24h": "24 hours", "1w": "week"};
const colorOf = name => () => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// timeOf is the time at the axis of a chart; of a week, the day.
const timeOf = at => {
	const date = new Date(at * 1000);
	return range === "1w" ? date.toLocaleDateString([], {month: "short", day: "numeric"}) : date.toLocaleTimeString([], {hour: "2-digit", minute: "2-digit", hourCycle: "h23"});
};

// lone returns the places of the values that no line shows, because nothing is known before and after.
const lone = (u, i) => {
	const values = u.data[i], places = [...values.keys()].filter(at => values[at] != null && values[at - 1] == null && values[at + 1] == null);
	return places.length ? places : null;
};

function chartOptions(width, isPartial) {
	const axis = {stroke: colorOf("--quiet"), grid: {stroke: colorOf("--line"), width: 1}, ticks: {stroke: colorOf("--line"), width: 1}};
	const fromZero = least => (u, min, max) => [0, Math.max(least, 1.05 * (max || 0))];
	const line = (name, text, more) => ({label: text, stroke: colorOf(name), width: 1.5, points: {show: false, size: 5, filter: lone}, spanGaps: false, ...more});
	return {
		width, height: chartHeight,
		scales: {x: {time: true}, y: {range: fromZero(1)}, ms: {range: fromZero(1)}},
		axes: [{...axis, values: (u, list) => list.map(timeOf)}, {...axis, size: 56, values: (u, list) => list.map(n => number(n) + "/s")},
			{...axis, scale: "ms", side: 1, size: 64, grid: {show: false}, values: (u, list) => list.map(n => number(n) + " ms")}],
		series: [{label: "Time", value: (u, at, _, i) => at === null ? "–" : new Date(at * 1000).toLocaleString([], {dateStyle: "short", timeStyle: "medium"}) + (isPartial(i) ? ", until now" : "")},
			...kinds.map(kind => line("--" + kind, series[kind].text, {dash: series[kind].dash, value: (u, n) => n === null ? "–" : rate(n) + "/s"})),
			line("--latency", "store latency", {scale: "ms", value: (u, n) => n === null ? "–" : duration(n / 1000)})],
		// All charts show the same time.
		cursor: {sync: {key: "zones"}, drag: {x: false, y: false}},
	};
}

// range is that of the charts. Of several answers only that to the last call is drawn.
let range = "1h", histories = 0;

// loadHistory draws the charts of the zones that are open.
async function loadHistory() {
	const ask = ++histories, open = [...cards.values()].filter(card => card.element.open && !card.element.hidden);
	if (!open.length) return;
	const query = new URLSearchParams({range});
	for (const name of new Set(open.map(card => card.name))) query.append("zone", name);
	const answer = await call(root + "history?" + query);
	if (ask !== histories) return;
	say("charts-note", missingOf(answer));
	for (const zone of answer.zones)
		for (const card of cards.values()) if (card.name === zone.zone && card.element.open) card.draw(answer, zone);
}

function showZones(status) {
	const at = Date.now(), isFirst = !cards.size;
	for (const zone of status.zones) {
		if (!cards.has(idOf(zone))) cards.set(idOf(zone), new Card(zone));
		cards.get(idOf(zone)).note(zone, at);
		cards.get(idOf(zone)).show(zone, status.problems);
	}
	for (const [id, card] of cards) {
		if (status.zones.some(z => idOf(z) === id)) continue;
		if (card.chart) card.chart.destroy();
		card.element.remove();
		cards.delete(id);
	}
	order(status.zones.map(z => cards.get(idOf(z))));
	if (isFirst && cards.size) [...byId("zones").children].slice(0, openAtFirst).forEach(e => e.open = true);
	filterZones();
}

// order puts the zones with trouble first, and moves no others: the focus would leave what moves.
function order(all) {
	const wanted = [...all.filter(card => card.trouble.textContent), ...all.filter(card => !card.trouble.textContent)].map(card => card.element);
	const focused = document.activeElement;
	wanted.forEach((e, i) => {
		if (byId("zones").children[i] !== e) byId("zones").insertBefore(e, byId("zones").children[i] || null);
	});
	if (document.activeElement !== focused && byId("zones").contains(focused)) focused.focus({preventScroll: true});
}

function filterZones() {
	const wanted = byId("zone-filter").value.trim().toLowerCase();
	let shown = 0;
	for (const card of cards.values()) {
		card.element.hidden = !card.name.toLowerCase().includes(wanted);
		shown += !card.element.hidden;
	}
	say("zones-note", !wanted ? "" : shown ? number(shown) + " of " + number(cards.size) + " zones" : "Nothing found: no zone has that in its name.");
}

byId("zone-filter").addEventListener("input", () => {
	filterZones();
	// Those that come back have not been drawn meanwhile.
	refreshHistory();
});
for (const [id, open] of [["open-all", true], ["close-all", false]])
	byId(id).addEventListener("click", () => {
		for (const card of cards.values()) if (!card.element.hidden) card.element.open = open;
	});
byId("range").addEventListener("change", event => {
	range = event.target.value;
	refreshHistory();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
	for (const card of cards.values()) if (card.chart) card.chart.redraw(false);
});
