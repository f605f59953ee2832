// Package lint finds limiters that the rest of a config makes ineffective: what they read is set behind them, or
// what they should protect is not behind them.
//
// Its rules look at the routes that a config has around a limiter, and at no request. A warning that is wrong
// costs more than a missed one, so a rule that is not sure is silent.
package lint

import (
	"encoding/json"
	"slices"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// Rule is a kind of mistake.
type Rule struct {
	// Name is what the option ignore of a handler calls it.
	Name string
	// check reports the mistakes about a limiter.
	check func(s *Subject)
}

// Rules are all rules.
var Rules = []Rule{
	{"error_route", errorRoute},
	{"late_source", lateSource},
	{"moved_path", movedPath},
	{"forwarded_key", forwardedKey},
	{"cached_refusal", cachedRefusal},
	{"literal_header", literalHeader},
	{"path_exempt", pathExempt},
	{"behind_cache", behindCache},
	{"unseen_refusal", unseenRefusal},
}

// Names returns the names of all rules.
func Names() (names []string) {
	for _, r := range Rules {
		names = append(names, r.Name)
	}
	return names
}

// Subject is a limiter among the handlers that it meets: the same request can pass them.
type Subject struct {
	Limiter *Handler
	Zones   []Zone
	// Before are the handlers that a request passes first, in their order, and After the handlers behind;
	// other limiters are left out.
	Before, After []*Handler
	// SeesAll is set unless there are more in After, far from the limiter.
	SeesAll bool
	// InErrors is set if the limiter is in an error route.
	InErrors bool

	// reach bounds how many handlers are looked at on each side.
	reach  int
	report func(zone, problem, remedy string)
}

// Report reports a mistake about a zone, or about all of them if its name is empty. The remedy is what to do.
func (s *Subject) Report(zone, problem, remedy string) { s.report(zone, problem, remedy) }

// Zone is a zone of a limiter, in the words of JSON.
type Zone struct {
	Name string
	Fields
}

// Warning is a mistake in a config.
type Warning struct {
	Rule  string
	Store string
	// Zone is its zone, or empty if it is about all zones of a handler.
	Zone string
	// Place is where the JSON of the config has the first such handler, and Times how many there are.
	Place   string
	Times   int
	Problem string
	Remedy  string
}

// About says which zone, or all zones of a handler, something is wrong with, and what.
func (w *Warning) About() string {
	if w.Zone == "" {
		return "rate_limit: " + w.Problem
	}
	return "zone " + w.Zone + ": " + w.Problem
}

// Advice says what to do.
func (w *Warning) Advice() string {
	return w.Remedy + ", or write ignore " + w.Rule + " if it is meant"
}

// Text returns the whole warning in a line.
func (w *Warning) Text() string { return w.About() + ": " + w.Advice() }

// Servers returns the warnings about servers that have been loaded, and none about others.
func Servers(servers []*caddyhttp.Server) []Warning {
	var c collector
	for _, server := range servers {
		if limiters, isWhole := fromModules(server); isWhole {
			c.check(server.Name(), limiters)
		}
	}
	return c.all
}

// Config returns the warnings about a config in JSON.
func Config(text []byte) []Warning {
	var root struct {
		Apps struct {
			HTTP struct {
				Servers map[string]Fields `json:"servers"`
			} `json:"http"`
		} `json:"apps"`
	}
	var c collector
	// Text that is not JSON is an error when it is loaded.
	if json.Unmarshal(text, &root) == nil {
		servers := root.Apps.HTTP.Servers
		for _, name := range sortedKeys(servers) {
			c.check(name, fromJSON(servers[name]))
		}
	}
	return c.all
}

// collector adds up warnings that differ only in their place.
type collector struct {
	all   []Warning
	known map[string]int
}

func (c *collector) check(server string, limiters []*Handler) {
	reach := reachFor(len(limiters))
	for _, l := range limiters {
		ignored := texts(l.Fields()["ignore"])
		s := &Subject{Limiter: l, Zones: zonesOf(l.Fields()), Before: l.before(reach), InErrors: l.route.isIn(onError), reach: reach}
		s.After, s.SeesAll = l.after(reach)
		for _, rule := range Rules {
			if slices.Contains(ignored, rule.Name) {
				continue
			}
			s.report = func(zone, problem, remedy string) {
				c.add(Warning{rule.Name, storeOf(l.Fields()), zone, server + "." + l.Place(), 1, problem, remedy})
			}
			rule.check(s)
		}
	}
}

func (c *collector) add(w Warning) {
	if c.known == nil {
		c.known = map[string]int{}
	}
	key := w.Store + "\x00" + w.Text()
	if i, ok := c.known[key]; ok {
		c.all[i].Times++
		return
	}
	c.known[key] = len(c.all)
	c.all = append(c.all, w)
}

// storeOf returns the name of a handler's store, or "" if it has one of its own.
func storeOf(limiter Fields) string {
	name, isName := limiter["store"].(string)
	if !isName && limiter["store"] != nil {
		return ""
	}
	if name == "" {
		return "default"
	}
	return name
}

func zonesOf(limiter Fields) (zones []Zone) {
	for _, z := range objects(limiter["zones"]) {
		zones = append(zones, Zone{text(z["name"]), z})
	}
	named := object(limiter["rate_limits"])
	for _, name := range sortedKeys(named) {
		zones = append(zones, Zone{name, object(named[name])})
	}
	return zones
}
