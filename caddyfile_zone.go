package shardlimit

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

const (
	handlerOptions = "store, rollout, zone, headers, problem, log_refusals, jitter, log_key"
	zoneOptions    = "match, key, events, window, algorithm, align, burst, cost, charge, batch, batch_share, free_status, count_status, max_wait, max_wait_queue, penalty, reserve, ipv4_prefix, ipv6_prefix, on_error, enforce"
)

// zoneParser parses the options of a handler or a zone.
type zoneParser struct{ *parser }

// handlerOption parses one option of the directive other than zone.
func (p zoneParser) handlerOption(h *Handler) error {
	if err := p.once(); err != nil {
		return err
	}
	switch p.Val() {
	case "store":
		name, err := p.arg()
		if err != nil {
			return err
		}
		h.StoreRaw, err = json.Marshal(name)
		return err
	case "rollout":
		return p.rollout(h)
	case "headers":
		return p.filled(&h.Headers)
	case "jitter":
		text, err := p.arg()
		if err != nil {
			return err
		}
		if h.Jitter, err = strconv.ParseFloat(text, 64); err != nil {
			return p.Errf("jitter %q: it must be a number, such as 0.2", text)
		}
		return nil
	case "problem":
		h.Problem = true
		return p.noArgs()
	case "log_refusals":
		return p.filled(&h.LogRefusals)
	case "log_key":
		h.LogKey = true
		return p.noArgs()
	case "sweep_interval":
		return p.duration(&h.SweepInterval)
	case "disable_metrics":
		h.DisableMetrics = true
		return p.noArgs()
	case "distributed":
		return p.Err(adviceDistributed)
	case "storage":
		return p.Err(adviceStorage)
	default:
		return p.unknown(handlerOptions, zoneOptions, "zone <name> { … }, in the block of rate_limit")
	}
}

// rollout parses another store and the share of the clients that it gets.
func (p zoneParser) rollout(h *Handler) error {
	args := p.RemainingArgs()
	if len(args) != 2 {
		return p.Errf("rollout takes two arguments, a store and how many percent of the clients it gets, such as rollout other 12.5, not %d", len(args))
	}
	percent, err := strconv.ParseFloat(args[1], 64)
	if err != nil {
		return p.Errf("rollout %s %q: it must be a number of percent from 0 to 100, such as 12.5", args[0], args[1])
	}
	h.Rollout = &Rollout{Store: args[0], Percent: percent}
	return nil
}

// enforce parses for how many percent of the clients the zone is enforced.
func (p zoneParser) enforce(z *Zone) error {
	text, err := p.arg()
	if err != nil {
		return err
	}
	percent, err := strconv.ParseFloat(text, 64)
	if err != nil {
		return p.Errf("enforce %q: it must be a number of percent from 0 to 100, such as 12.5", text)
	}
	z.Enforce = &percent
	return nil
}

// oneLineZone parses the arguments of the one-line form.
func (p zoneParser) oneLineZone() (*Zone, error) {
	args := p.RemainingArgs()
	if len(args) != 3 && len(args) != 4 {
		return nil, p.Err("write rate_limit <key> <events> <window> [<name>], or rate_limit { … } with a block")
	}
	window, err := caddy.ParseDuration(args[2])
	if err != nil || window <= 0 {
		return nil, p.Errf("window %q: it must be a time span above zero, such as 10s, 1m, 1h or 1d; write rate_limit <key> <events> <window> [<name>]", args[2])
	}
	z := &Zone{Name: "default", Key: Texts{args[0]}, Events: Amount(args[1]), Window: caddy.Duration(window)}
	if z.Events.isDynamic() {
		return nil, p.Errf("events %s: a placeholder needs a number that counts where it yields none: write a block with a zone and its option events %s 100", z.Events, z.Events)
	}
	if len(args) == 4 {
		z.Name = args[3]
	}
	return z, nil
}

// parseZone parses one zone of the directive.
func parseZone(h httpcaddyfile.Helper) (*Zone, error) {
	p := zoneParser{newParser(h.Dispenser)}
	z := new(Zone)
	if err := p.text(&z.Name); err != nil {
		return nil, p.Err("zone takes one argument, its name")
	}
	for nesting := h.Nesting(); h.NextBlock(nesting); {
		var err error
		switch h.Val() {
		case "match":
			err = parseMatch(h, "match", &z.MatcherSetsRaw)
		case "reserve":
			p.startsAt("reserve", p.Token())
			err = p.reserve(h, z)
		default:
			err = p.zoneOption(z)
		}
		if err != nil {
			return nil, err
		}
	}
	if err := z.validate(); err != nil {
		return nil, p.at(err)
	}
	return z, nil
}

func (p zoneParser) zoneOption(z *Zone) (err error) {
	if err := p.once(); err != nil {
		return err
	}
	switch p.Val() {
	case "key":
		z.Key, err = p.args()
		return err
	case "events":
		return p.events(z)
	case "window":
		return p.duration(&z.Window)
	case "algorithm":
		return p.filled(&z.Algorithm)
	case "align":
		z.Align = true
		return p.noArgs()
	case "burst":
		return p.positive64(&z.Burst)
	case "cost":
		return p.filled((*string)(&z.Cost))
	case "charge":
		return p.filled(&z.Charge)
	case "batch":
		return p.filled((*string)(&z.Batch))
	case "batch_share":
		return p.positive(&z.BatchShare)
	case "free_status":
		z.FreeStatus, err = p.args()
		return err
	case "count_status":
		z.CountStatus, err = p.args()
		return err
	case "max_wait":
		return p.duration(&z.MaxWait)
	case "max_wait_queue":
		return p.positive(&z.MaxWaitQueue)
	case "penalty":
		return p.duration(&z.Penalty)
	case "ipv4_prefix":
		return p.integer(&z.IPv4Prefix)
	case "ipv6_prefix":
		return p.integer(&z.IPv6Prefix)
	case "on_error":
		return p.filled(&z.OnError)
	case "enforce":
		return p.enforce(z)
	default:
		return p.unknown(zoneOptions, handlerOptions, "the block of rate_limit, outside zone")
	}
}

// events parses a number, or a placeholder and the number that stands in.
func (p zoneParser) events(z *Zone) error {
	args := p.RemainingArgs()
	if len(args) == 0 || len(args) > 2 {
		return p.Err("events takes a number, or a placeholder and a number that counts where it yields none")
	}
	z.Events = Amount(args[0])
	if len(args) == 1 {
		return nil
	}
	fallback, err := strconv.ParseInt(args[1], 10, 64)
	if err != nil || fallback == 0 {
		return p.Errf("events %s: the fallback %q must be a number from 1 to 2^52", args[0], args[1])
	}
	z.EventsFallback = fallback
	return nil
}

// reserve parses a part that is kept, and for which requests.
func (p zoneParser) reserve(h httpcaddyfile.Helper, z *Zone) error {
	if !p.NextArg() {
		return p.Err("reserve takes a percentage and matchers, such as reserve 20 @important")
	}
	percent, err := strconv.Atoi(p.Val())
	if err != nil {
		return p.Errf("reserve %q: it must be a whole number of percent from 1 to 100, as in reserve 20 @important", p.Val())
	}
	r := &Reserve{Percent: percent}
	z.Reserves = append(z.Reserves, r)
	if err := parseMatch(h, "reserve "+p.Val(), &r.MatcherSetsRaw); err != nil {
		return err
	}
	// Here, while this reserve's line is the one to name.
	if err := z.validateReserves(); err != nil {
		return p.at(err)
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
		// The helper looks for a matcher right after a directive.
		named := h.WithDispenser(caddyfile.NewDispenser([]caddyfile.Token{directive, h.Token()}))
		named.Next()
		if set, err = named.ExtractMatcherSet(); err != nil {
			return h.Errf("%s %s: there is no such matcher: define it in this site, such as %s path /api/*", which, h.Val(), h.Val())
		}
	default:
		if which != "match" {
			return h.Errf("%s takes one matcher: write one that matches all that it is kept for", which)
		}
		return h.Errf("match takes one matcher: repeat it for more, any of which then may match")
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
		return nil, errorAt(start, fmt.Errorf("%s is empty: write %s @<matcher>, or matchers in a block", which, which))
	}
	d.Reset()
	d.Next()
	return caddyhttp.ParseCaddyfileNestedMatcherSet(d)
}
