package shardlimit

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// parseDirective parses the rate_limit directive:
//
//	rate_limit [<matcher>] <key> <events> <window> [<name>]
//
//	rate_limit [<matcher>] {
//		store   <name>
//		rollout <store> <percent>
//		zone <name> {
//			match       @<matcher> | { <matchers> }
//			key         <text>...
//			events      <n> | <placeholder> <fallback n>
//			window      <duration>
//			algorithm   fixed_window|sliding_window|sliding_log|gcra|concurrency
//			align
//			burst       <n>
//			cost        <n>|<placeholder>
//			charge      after|before
//			batch       off|auto|<n>
//			batch_share <percent>
//			free_status <code|class>... | none
//			count_status <code|class>...
//			max_wait    <duration>
//			max_wait_queue <n>
//			penalty     <duration>
//			reserve     <percent> @<matcher> | <percent> { <matchers> }
//			ipv4_prefix <bits>
//			ipv6_prefix <bits>
//			on_error    allow|deny|local
//			enforce     <percent>
//		}
//		headers github|ietf|both|none
//		problem
//		log_refusals first|all|none
//		jitter  <ratio>
//		log_key
//	}
//
// It only translates. What is allowed is for the handler and its zones to say;
// they are asked here as well, so that errors come with the line.
func parseDirective(h httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
	handler := new(Handler)
	h.Next()
	p := parser{Dispenser: h.Dispenser, lines: map[string]caddyfile.Token{}, start: h.Token()}
	zones := map[*Zone]caddyfile.Token{}
	oneLine := h.CountRemainingArgs() > 0
	if oneLine {
		z, err := p.oneLineZone()
		if err != nil {
			return nil, err
		}
		handler.Zones, zones[z] = []*Zone{z}, p.start
	}
	for h.NextBlock(0) {
		if oneLine && h.Val() == "zone" {
			return nil, h.Err("rate_limit has a zone on its line and another in its block: write both as zones in the block")
		}
		if h.Val() == "zone" {
			start := h.Token()
			z, err := parseZone(h)
			if err != nil {
				return nil, err
			}
			handler.Zones = append(handler.Zones, z)
			zones[z], p.lines["zone "+z.Name] = start, start
			continue
		}
		if err := p.handlerOption(handler); err != nil {
			return nil, err
		}
	}
	if err := handler.validate(); err != nil {
		return nil, p.at(err)
	}
	storeName, _, err := rawStoreName(handler.StoreRaw)
	if err != nil {
		return nil, p.at(err)
	}
	if err := knowsStore(h, "store", storeName); err != nil {
		return nil, p.at(err)
	}
	stores := []string{cmp.Or(storeName, defaultStore)}
	if handler.Rollout != nil {
		if err := knowsStore(h, "rollout", handler.Rollout.Store); err != nil {
			return nil, p.at(err)
		}
		stores = append(stores, handler.Rollout.Store)
	}
	return handler, claimZones(h, stores, handler.Zones, zones)
}

// knowsStore refuses the name of a store that the global option does not
// configure, as the app does for a config in JSON.
func knowsStore(h httpcaddyfile.Helper, option, name string) error {
	var app App
	if option, ok := h.Option("rate_limit").(httpcaddyfile.App); ok {
		if err := json.Unmarshal(option.Value, &app); err != nil {
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
	return unknownStore(option, name, names)
}

// claimZones refuses zones that another directive defines differently, as the
// app does for a config in JSON, where there are no lines to name.
func claimZones(h httpcaddyfile.Helper, stores []string, zones []*Zone, starts map[*Zone]caddyfile.Token) error {
	type claim struct{ definition, place string }
	const state = "rate_limit.zones"
	claims, ok := h.State[state].(map[zoneID]claim)
	if !ok {
		claims = map[zoneID]claim{}
		h.State[state] = claims
	}
	for _, z := range zones {
		mine := claim{z.definition(), fmt.Sprintf("%s:%d", starts[z].File, starts[z].Line)}
		for _, store := range stores {
			other, taken := claims[zoneID{store, z.Name}]
			if !taken {
				claims[zoneID{store, z.Name}] = mine
			} else if err := sameDefinition(z.Name, other.definition, mine.definition); err != nil {
				return fmt.Errorf("at %s and %s: %w", other.place, mine.place, err)
			}
		}
	}
	return nil
}

// parser parses the options of one block, each of which may be given once.
type parser struct {
	*caddyfile.Dispenser
	start caddyfile.Token
	lines map[string]caddyfile.Token
}

// once notes that the current token is an option, and refuses it the second
// time.
func (p *parser) once() error {
	if first, ok := p.lines[p.Val()]; ok {
		return p.Errf("%s is given twice, first in line %d: remove one", p.Val(), first.Line)
	}
	p.lines[p.Val()] = p.Token()
	return nil
}

// at adds to err the place of the option it is about, or that of the block.
func (p *parser) at(err error) error {
	token := p.start
	var bad *optionError
	if errors.As(err, &bad) {
		if option, ok := p.lines[bad.option]; ok {
			token = option
		}
	}
	return errorAt(token, err)
}

func errorAt(token caddyfile.Token, err error) error {
	d := caddyfile.NewDispenser([]caddyfile.Token{token})
	d.Next()
	return d.WrapErr(err)
}

// arg returns the only argument of an option.
func (p *parser) arg() (string, error) {
	option := p.Val()
	args := p.RemainingArgs()
	if len(args) != 1 {
		return "", p.Errf("%s takes one argument, not %d", option, len(args))
	}
	return args[0], nil
}

// args returns the arguments of an option that takes one or more.
func (p *parser) args() ([]string, error) {
	option := p.Val()
	args := p.RemainingArgs()
	if len(args) == 0 {
		return nil, p.Errf("%s takes at least one argument", option)
	}
	return args, nil
}

// text sets an option that is a text.
func (p *parser) text(to *string) (err error) {
	*to, err = p.arg()
	return err
}

// filled sets an option that is a text, of which none would mean the default.
func (p *parser) filled(to *string) error {
	option := p.Val()
	if err := p.text(to); err != nil {
		return err
	}
	if *to == "" {
		return p.Errf("%s is empty: give it a value, or remove it", option)
	}
	return nil
}

// integer sets an option that is a whole number.
func (p *parser) integer(to *int) error {
	option := p.Val()
	text, err := p.arg()
	if err != nil {
		return err
	}
	if *to, err = strconv.Atoi(text); err != nil {
		return p.Errf("%s %q: it must be a whole number", option, text)
	}
	return nil
}

// positive sets an option that is a whole number of at least 1, where 0 would
// mean the default.
func (p *parser) positive(to *int) error {
	option := p.Val()
	if err := p.integer(to); err != nil {
		return err
	}
	if *to < 1 {
		return p.Errf("%s %d: it must be at least 1", option, *to)
	}
	return nil
}

// positive64 is positive for numbers up to 2^52.
func (p *parser) positive64(to *int64) error {
	option := p.Val()
	text, err := p.arg()
	if err != nil {
		return err
	}
	if *to, err = strconv.ParseInt(text, 10, 64); err != nil || *to < 1 {
		return p.Errf("%s %q: it must be a whole number from 1 to 2^52", option, text)
	}
	return nil
}

// duration sets an option that is a time span, of which 0 would mean the
// default.
func (p *parser) duration(to *caddy.Duration) error {
	option := p.Val()
	text, err := p.arg()
	if err != nil {
		return err
	}
	d, err := caddy.ParseDuration(text)
	if err != nil || d <= 0 {
		return p.Errf("%s %q: it must be a time span above zero, such as 250ms, 10s, 1m, 1h or 1d", option, text)
	}
	*to = caddy.Duration(d)
	return nil
}

// unknown is the error about an option that does not exist here. It may be one
// of those that belong elsewhere.
func (p *parser) unknown(known, elsewhere, place string) error {
	switch {
	case p.Val() == "{":
		return p.Err("the option before { takes no block: remove it")
	case p.Val() != "" && slices.Contains(strings.Split(elsewhere, ", "), p.Val()):
		return p.Errf("%s belongs into %s", p.Val(), place)
	}
	return p.Errf("unknown option %s: it must be one of %s%s", p.Val(), known, didYouMean(p.Val(), strings.Split(known, ", ")))
}
