package shardlimit

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/shardlimit/caddy-shardlimit/internal/limiter"
	"github.com/shardlimit/caddy-shardlimit/internal/option"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// parseDirective parses the rate_limit directive:
//
//	rate_limit [<matcher>] <key> <events> <window> [<name>]
//
//	rate_limit [<matcher>] {
//		zone <name> {
//			match         @<matcher> | { <matchers> }
//			key           <text>...
//			events        <n> | <placeholder> <fallback n>
//			window        <duration> [aligned] | day|week|month|year [from monday|sunday] [in <IANA name>]
//			algorithm     fixed_window|sliding_window|sliding_log|gcra|concurrency
//			burst         <n> | <placeholder> <fallback n>
//			cost          <n> | <sum> [<fallback n>]
//			charge        after|before
//			batch         off|auto|<n>
//			count_status  [not] <code|class|grpc:code>... | all
//			reset_status  <code|class|grpc:code>...
//			warn          <percent>
//			max_wait      <duration> [<n>]
//			penalty       <duration>
//			obey_upstream
//			reserve       <percent> @<matcher> | <percent> { <matchers> }
//			ipv4_prefix   <bits>
//			ipv6_prefix   <bits>
//			block_status  <code>
//			on_error      allow|deny|local
//			enforce       <percent>
//		}
//		store        <name>
//		rollout      <store> <percent>
//		headers      github|ietf|both|none
//		problem
//		log_refusals first|all|none
//		jitter       <ratio>
//		log_key
//		ignore       <rule>...
//	}
//
// It only translates. The rules are those of the handler and its zones, which are
// also checked here, so that errors name the line.
func parseDirective(h httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
	handler := new(Handler)
	h.Next()
	err := handler.parse(h, handler.pluginOptions())
	return handler, err
}

// directive returns the name of the directive.
func (l *Limits) directive() string {
	if l.isService {
		return "rate_limit_service"
	}
	return "rate_limit"
}

// ParseService parses the block of the directive of a service, which has the options of l, but none about
// responses of HTTP, and more.
func (l *Limits) ParseService(h httpcaddyfile.Helper, more ...option.Row) error {
	l.isService = true
	h.Next()
	if h.CountRemainingArgs() > 0 {
		return h.Errf("%s takes a block, without arguments: %[1]s { … }", l.directive())
	}
	return l.parse(h, nil, more...)
}

// parse parses the arguments and the block of the directive. It accepts also more options, and hides
// some of them.
func (l *Limits) parse(h httpcaddyfile.Helper, hidden []option.Row, more ...option.Row) error {
	start := h.Token()
	p := option.NewParser(h.Dispenser)
	zones := map[*Zone]caddyfile.Token{}
	oneLine := h.CountRemainingArgs() > 0
	if oneLine {
		z, err := parseOneLineZone(p)
		if err != nil {
			return err
		}
		l.Zones, zones[z] = []*Zone{z}, start
	}
	addZone := func(p *option.Parser) error {
		if oneLine {
			return p.Err("rate_limit has a zone on its line and another in its block: write both as zones in the block")
		}
		start := p.Token()
		z, err := l.parseZone(h)
		if err != nil {
			return err
		}
		l.Zones, zones[z] = append(l.Zones, z), start
		return l.isOnly(z, zones)
	}
	if err := p.Table(&option.Table{
		Rows: slices.Concat(more, l.options(addZone)), Also: hidden,
		Elsewhere: option.Names(new(Zone).options(h)), Place: "zone <name> { … }, in the block of " + l.directive(),
	}); err != nil {
		return err
	}
	if err := l.validate(); err != nil {
		return p.At(err)
	}
	storeName, _, _ := rawStoreName(l.StoreRaw) // validated
	if err := knowsStore(h, "store", storeName); err != nil {
		return p.At(err)
	}
	storeNames := []string{cmp.Or(storeName, defaultStore)}
	if l.Rollout != nil {
		if err := knowsStore(h, "rollout", l.Rollout.Store); err != nil {
			return p.At(err)
		}
		storeNames = append(storeNames, l.Rollout.Store)
	}
	claimed := claimsIn(h)
	for _, z := range l.Zones {
		if err := claimed.add(z, origin{zones[z], start}, storeNames); err != nil {
			return err
		}
	}
	return nil
}

// claimsIn returns the zones that directives before this one define.
func claimsIn(h httpcaddyfile.Helper) claims {
	const state = "rate_limit.zones"
	claimed, ok := h.State[state].(claims)
	if !ok {
		claimed = claims{}
		h.State[state] = claimed
	}
	return claimed
}

// isOnly returns an error if another zone of a directive has the same name.
func (l *Limits) isOnly(z *Zone, zones map[*Zone]caddyfile.Token) error {
	for other, at := range zones {
		if other != z && other.Name == z.Name {
			return twice(origin{at, at}, origin{zones[z], zones[z]}, fmt.Errorf("zone %s is defined twice in one %s: rename one", z.Name, l.directive()))
		}
	}
	return nil
}

// origin is where a Caddyfile defines a zone.
type origin struct{ zone, directive caddyfile.Token }

// twice says where the two definitions of a zone are, and what to do if they are one that is imported twice.
func twice(first, second origin, err error) error {
	one, other := option.Place(first.zone), option.Place(second.zone)
	if one == other {
		one, other = option.Place(first.directive), option.Place(second.directive)
	}
	err = fmt.Errorf("at %s and %s: %w", one, other, err)
	if first.zone.File == second.zone.File && first.zone.Line == second.zone.Line {
		return fmt.Errorf("%w; an argument of import can name it, as in zone {args[0]}", err)
	}
	return err
}

// knowsStore returns an error for the name of a store that the global option does
// not configure, as the app does for a config in JSON.
func knowsStore(h httpcaddyfile.Helper, which, name string) error {
	var app App
	if which, ok := h.Option("rate_limit").(httpcaddyfile.App); ok {
		if err := json.Unmarshal(which.Value, &app); err != nil {
			return fmt.Errorf("read rate_limit: %w", err)
		}
	}
	names := slices.Sorted(maps.Keys(app.StoresRaw))
	if len(names) == 0 {
		names = []string{defaultStore}
	}
	if slices.Contains(names, cmp.Or(name, defaultStore)) {
		return nil
	}
	return unknownStore(which, name, names)
}

func (l *Limits) parseStore(p *option.Parser) (err error) {
	args := p.RemainingArgs()
	if len(args) != 1 || p.HasBlock() {
		return p.Err("store takes the name of a store here: define it in the global options, as in { rate_limit { store <name> redis { url redis://<host:port> } } }")
	}
	l.StoreRaw, err = json.Marshal(args[0])
	return err
}

// parseRollout parses another store and the share of the clients that it gets.
func (l *Limits) parseRollout(p *option.Parser) error {
	args := p.RemainingArgs()
	if len(args) != 2 {
		return p.Errf("rollout takes two arguments, a store and how many percent of the clients it gets, such as rollout other 12.5, not %d", len(args))
	}
	percent, err := strconv.ParseFloat(args[1], 64)
	if err != nil {
		return p.Errf("rollout %s %q: it must be a number of percent from 0 to 100, such as 12.5", args[0], args[1])
	}
	l.Rollout = &Rollout{Store: args[0], Percent: percent}
	return nil
}

// parseOneLineZone parses the arguments of the one-line form.
func parseOneLineZone(p *option.Parser) (*Zone, error) {
	args := p.RemainingArgs()
	if len(args) == 2 {
		if events, window, ok := rateIn(args[1]); ok {
			return nil, p.Errf("rate_limit %s %s: write rate_limit %s %s %s", args[0], args[1], args[0], events, window)
		}
	}
	if len(args) != 3 && len(args) != 4 {
		return nil, p.Err("write rate_limit <key> <events> <window> [<name>], or rate_limit { … } with a block")
	}
	z := &Zone{Name: "default", Key: Texts{args[0]}, Events: Amount(args[1])}
	if !z.setWindow(args[2]) {
		return nil, p.Errf("window %q: it must be %s; write rate_limit <key> <events> <window> [<name>]", args[2], windowWords)
	}
	if z.Events.isDynamic() {
		return nil, p.Errf("events %s: a placeholder needs a number that counts where it yields none: write a block with a zone and its option events %s 100", z.Events, z.Events)
	}
	if len(args) == 4 {
		z.Name = args[3]
	}
	return z, nil
}

// parseZone parses one zone of the directive.
func (l *Limits) parseZone(h httpcaddyfile.Helper) (*Zone, error) {
	p := option.NewParser(h.Dispenser)
	z := &Zone{isService: l.isService}
	var err error
	if z.Name, err = p.Arg(); err != nil {
		return nil, p.Err("zone takes one argument, its name")
	}
	if err := p.Table(&option.Table{
		Rows: z.options(h), Elsewhere: option.Names(l.options(nil)), Place: "the block of " + l.directive() + ", outside zone",
	}); err != nil {
		return nil, err
	}
	if p.IsEmpty() {
		return nil, p.At(fmt.Errorf("zone %s has no options: write them in its block, as in zone %s { … }, with key, events and window at least", z.Name, z.Name))
	}
	if err := z.validate(""); err != nil {
		return nil, p.At(err)
	}
	return z, nil
}

func (z *Zone) parseEnforce(p *option.Parser) error {
	z.Enforce = new(float64)
	return option.Number(z.Enforce, " of percent from 0 to 100, such as 12.5").Set(p)
}

// parseCountStatus parses the statuses that cost something, or, after not, those that
// do not.
func (z *Zone) parseCountStatus(p *option.Parser) error {
	args := p.RemainingArgs()
	switch {
	case len(args) == 0:
		return p.Err("count_status takes at least one argument")
	case args[0] != "not":
		z.CountStatus = args
	case len(args) == 1:
		return p.Err("count_status not takes at least one status, such as count_status not 304 5xx")
	default:
		z.CountStatusNot = args[1:]
	}
	return nil
}

// parseMaxWait parses a time span, and how many requests wait at most.
func (z *Zone) parseMaxWait(p *option.Parser) error {
	args := p.RemainingArgs()
	if len(args) == 0 || len(args) > 2 {
		return p.Errf("max_wait takes a time span, and how many requests are held at most, such as max_wait 5s 1000, not %d arguments", len(args))
	}
	wait, err := caddy.ParseDuration(args[0])
	if err != nil || wait <= 0 {
		return p.Errf("max_wait %q: it must be a time span above zero, such as 250ms, 10s, 1m, 1h or 1d", args[0])
	}
	z.MaxWait = caddy.Duration(wait)
	if len(args) == 1 {
		return nil
	}
	if z.MaxWaitQueue, err = strconv.Atoi(args[1]); err != nil || z.MaxWaitQueue < 1 {
		return p.Errf("max_wait %s %q: the number of requests must be a whole number from 1 on", args[0], args[1])
	}
	return nil
}

// parseCost parses a number, or a sum and its fallback, which may be left out.
func (z *Zone) parseCost(p *option.Parser) error {
	text := strings.TrimSpace(strings.Join(p.RemainingArgs(), " "))
	if text == "" {
		return p.Err("cost takes a number, or a placeholder and a number that counts where it yields none")
	}
	if z.Cost = Amount(text); !z.Cost.isDynamic() {
		return nil
	}
	sum, fallback, err := limiter.ParseSum(text)
	if err != nil {
		return nil // the check says what is wrong
	}
	if z.Cost = Amount(sum.String()); fallback == "" {
		return nil
	}
	n, err := strconv.ParseInt(fallback, 10, 64)
	if err != nil {
		return p.Errf("cost %s: the fallback %q must be a whole number from 0 to 2^52; several terms are added with +", sum, fallback)
	}
	z.CostFallback = &n
	return nil
}

// parseAmount parses a number, or a placeholder and its fallback.
func parseAmount(to *Amount, fallback *int64) option.Setter {
	return func(p *option.Parser) error {
		name, args := p.Val(), p.RemainingArgs()
		if len(args) == 0 || len(args) > 2 || args[0] == "" {
			return p.Errf("%s takes a number, or a placeholder and a number that counts where it yields none", name)
		}
		*to = Amount(args[0])
		if len(args) == 1 {
			return nil
		}
		n, err := strconv.ParseInt(args[1], 10, 64)
		if err != nil || n == 0 {
			return p.Errf("%s %s: the fallback %q must be a number from 1 to 2^52", name, args[0], args[1])
		}
		*fallback = n
		return nil
	}
}

// parseWindow parses the length of the window, or the unit of the calendar, and what
// follows it.
func (z *Zone) parseWindow(p *option.Parser) error {
	args := p.RemainingArgs()
	if len(args) == 0 {
		return p.Errf("window is empty: it must be %s", windowWords)
	}
	text := args[0]
	if !z.setWindow(text) {
		return p.Errf("window %q: it must be %s", text, windowWords)
	}
	for args = args[1:]; len(args) > 0; {
		values := map[string]*string{"from": &z.WeekStarts, "in": &z.TimeZone}
		word := args[0]
		to, takesValue := values[word]
		switch {
		case word == "aligned" && !z.Align:
			z.Align, args = true, args[1:]
		case takesValue && *to == "" && len(args) > 1 && args[1] != "":
			*to, args = args[1], args[2:]
		default:
			return p.Errf("window %s: %q is not understood there: write window <duration> [aligned], or window day|week|month|year [from monday|sunday] [in <IANA name>]", text, word)
		}
	}
	return nil
}

const windowWords = "a time span above zero, such as 10s, 1m, 1h or 1d, or day, week, month or year"

// setWindow sets the length of the window, or the unit of the calendar, and reports
// whether text is one.
func (z *Zone) setWindow(text string) bool {
	if store.CalendarUnit(text).Length() != 0 {
		z.Calendar = text
		return true
	}
	window, err := caddy.ParseDuration(text)
	z.Window = caddy.Duration(window)
	return err == nil && window > 0
}

// parseReserve parses the share that is kept, and the matchers of the requests for
// which it is.
func (z *Zone) parseReserve(h httpcaddyfile.Helper, p *option.Parser) error {
	if !p.NextArg() {
		return p.Err("reserve takes a percentage and matchers, such as reserve 20 @important")
	}
	percent, err := option.WholePercent(p.Val(), "as in reserve 20 @important")
	if err != nil {
		return p.Errf("reserve %w", err)
	}
	r := &Reserve{Percent: percent}
	z.Reserves = append(z.Reserves, r)
	if err := parseMatch(h, "reserve "+p.Val(), &r.MatcherSetsRaw); err != nil {
		return err
	}
	// Checked here, while the line of this reserve is known.
	if err := z.validateReserves(); err != nil {
		return p.At(err)
	}
	return nil
}

// parseMatch adds a matcher set to sets: a named one, or the one in a block.
func parseMatch(h httpcaddyfile.Helper, which string, sets *caddyhttp.RawMatcherSets) error {
	var set caddy.ModuleMap
	var err error
	switch h.CountRemainingArgs() {
	case 0:
		set, err = parseMatchBlock(h, which)
	case 1:
		directive := h.Token()
		h.NextArg()
		if !strings.HasPrefix(h.Val(), "@") {
			return h.Errf("%s %s: write %s @<matcher>, or matchers in a block", which, h.Val(), which)
		}
		// The helper expects the matcher right after a directive.
		named := h.WithDispenser(caddyfile.NewDispenser([]caddyfile.Token{directive, h.Token()}))
		named.Next()
		if set, err = named.ExtractMatcherSet(); err != nil {
			return h.Errf("%s %s: there is no such matcher: define it in this site, such as %s path /api/*", which, h.Val(), h.Val())
		}
	default:
		if args := h.RemainingArgs(); !strings.HasPrefix(args[0], "@") {
			return h.Errf("%s %s: write the matcher in a block, as in %s { %s }, or name one, as in %s @<matcher>", which, strings.Join(args, " "), which, strings.Join(args, " "), which)
		}
		if which != "match" {
			return h.Errf("%s takes @<matcher>, or matchers in a block: write one that matches all that it is kept for", which)
		}
		return h.Errf("match takes @<matcher>, or matchers in a block: repeat match for more, any of which then may match")
	}
	if err != nil {
		return err
	}
	*sets = append(*sets, set)
	return nil
}

// parseMatchBlock parses the matchers in a block.
func parseMatchBlock(h httpcaddyfile.Helper, which string) (caddy.ModuleMap, error) {
	start, d := h.Token(), h.NewFromNextSegment()
	d.Next()
	empty := true
	for nesting := d.Nesting(); d.NextBlock(nesting); {
		empty = false
		if d.Token().Quoted() {
			continue // an expression
		}
		if _, err := caddy.GetModule("http.matchers." + d.Val()); err != nil {
			return nil, d.Errf("unknown matcher %s: write a request matcher, such as path /api/*", d.Val())
		}
		d.NextSegment()
	}
	if empty {
		return nil, option.ErrorAt(start, fmt.Errorf("%s is empty: write %s @<matcher>, or matchers in a block", which, which))
	}
	d.Reset()
	d.Next()
	return caddyhttp.ParseCaddyfileNestedMatcherSet(d)
}

// parseGlobalOption parses the rate_limit global option. Several blocks of it are
// merged:
//
//	rate_limit {
//		store [<name>] <module> { … }
//	}
func parseGlobalOption(d *caddyfile.Dispenser, existing any) (any, error) {
	app := &App{StoresRaw: caddy.ModuleMap{}}
	if other, ok := existing.(httpcaddyfile.App); ok {
		if err := json.Unmarshal(other.Value, app); err != nil {
			return nil, fmt.Errorf("read rate_limit: %w", err)
		}
	}
	d.Next()
	if d.NextArg() {
		return nil, d.Err("the global option rate_limit takes a block: rate_limit { … }; the directive belongs in a site")
	}
	for d.NextBlock(0) {
		if d.Val() != "store" {
			return nil, d.Errf("unknown option %s: the global option takes only store; zones and all else belong in the directive rate_limit in a site", d.Val())
		}
		if err := parseStore(d, app.StoresRaw); err != nil {
			return nil, err
		}
	}
	return httpcaddyfile.App{Name: "rate_limit", Value: caddyconfig.JSON(app, nil)}, nil
}

func parseStore(d *caddyfile.Dispenser, stores caddy.ModuleMap) error {
	name := defaultStore
	switch d.CountRemainingArgs() {
	case 1:
	case 2:
		d.NextArg()
		name = d.Val()
	default:
		return d.Err("write store [<name>] memory or store [<name>] redis, then a block")
	}
	d.NextArg()
	if !option.ValidName(name) {
		return d.Errf("store name %q: use only letters, digits and the characters _ . -", name)
	}
	if _, ok := stores[name]; ok {
		return d.Errf("store %s is defined twice: give each its own name, as in store <name> %s", name, d.Val())
	}
	module := d.Val()
	if _, err := caddy.GetModule("rate_limit.stores." + module); err != nil {
		if _, err := caddy.GetModule("rate_limit.stores." + name); err == nil && strings.ContainsAny(module, ":./") {
			url := module
			if !strings.Contains(url, "://") {
				url = "redis://" + url
			}
			return d.Errf("store %s %s: an address belongs in the block of the store, as in store %s { url %s }", name, module, name, url)
		}
		return d.Errf("unknown store module %s: write store [<name>] memory or store [<name>] redis; other modules must be built into this Caddy", module)
	}
	unmarshaled, err := caddyfile.UnmarshalModule(d, "rate_limit.stores."+module)
	if err != nil {
		return err
	}
	stores[name] = caddyconfig.JSONModuleObject(unmarshaled, "module", module, nil)
	return nil
}
