package replay

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// logging is how the logs of a config write entries, and which they leave out.
type logging struct {
	logs   []*accessLog
	server serverLogs
	// unit is that of durations that are whole numbers; 0 for seconds.
	unit time.Duration
	// timeKeys and loggerKeys are the names of ts and logger, and layouts those of times, beside the
	// defaults.
	timeKeys, loggerKeys, layouts []string
}

// serverLogs are the loggers of the server.
type serverLogs struct {
	Default string                           `json:"default_logger_name"`
	ByHost  map[string]caddyhttp.StringArray `json:"logger_names"`
	// SkipHosts are hosts without a logger.
	SkipHosts []string `json:"skip_hosts"`
}

// accessLog is a log of the config. The replayed one is one of them.
type accessLog struct {
	name     string
	Include  []string        `json:"include"`
	Exclude  []string        `json:"exclude"`
	Level    string          `json:"level"`
	Sampling json.RawMessage `json:"sampling"`
	Encoder  *encoder        `json:"encoder"`
}

// encoder is an encoder of Caddy, or one around another.
type encoder struct {
	Format         string                     `json:"format"`
	Wrap           *encoder                   `json:"wrap"`
	Fields         map[string]json.RawMessage `json:"fields"`
	TimeKey        string                     `json:"time_key"`
	NameKey        string                     `json:"name_key"`
	TimeFormat     string                     `json:"time_format"`
	DurationFormat string                     `json:"duration_format"`
}

// filter is what a log does with a field.
type filter struct {
	Filter  string `json:"filter"`
	Actions []struct {
		Type      string `json:"type"`
		Parameter string `json:"parameter"`
		Name      string `json:"name"`
	} `json:"actions"`
}

// wholeUnits are the units in which Caddy writes durations as whole numbers, by duration_format.
var wholeUnits = map[string]time.Duration{
	"ms": time.Millisecond, "milli": time.Millisecond, "millis": time.Millisecond,
	"ns": time.Nanosecond, "nano": time.Nanosecond, "nanos": time.Nanosecond,
}

// knownFormats are the values of time_format that instant reads without a layout.
var knownFormats = []string{
	"unix_seconds_float", "unix_milli_float", "unix_nano", "iso8601", "rfc3339", "rfc3339_nano", "wall", "wall_milli", "wall_nano", "common_log",
}

// loggingOf reads the JSON of the logging of a config, which may be none.
func loggingOf(raw json.RawMessage) (*logging, error) {
	var config struct {
		Logs map[string]*accessLog `json:"logs"`
	}
	if err := unmarshal(raw, &config); err != nil {
		return nil, fmt.Errorf("decode the logging of the config: %w", err)
	}
	l := new(logging)
	for _, name := range slices.Sorted(maps.Keys(config.Logs)) {
		log := config.Logs[name]
		if log == nil {
			continue
		}
		log.name = name
		l.logs = append(l.logs, log)
		for e := log.Encoder; e != nil; e = e.Wrap {
			if err := l.read(e); err != nil {
				return nil, err
			}
		}
	}
	return l, nil
}

// read notes how an encoder writes times and durations.
func (l *logging) read(e *encoder) error {
	if unit := wholeUnits[e.DurationFormat]; unit != 0 && l.unit != 0 && unit != l.unit {
		return errors.New("the logs of the config have different values of duration_format, so the durations of a log are not clear: leave that of the replayed log in the config")
	} else if unit != 0 {
		l.unit = unit
	}
	if e.TimeFormat != "" && !slices.Contains(knownFormats, e.TimeFormat) {
		l.layouts = append(l.layouts, e.TimeFormat)
	}
	if e.TimeKey != "" {
		l.timeKeys = append(l.timeKeys, e.TimeKey)
	}
	if e.NameKey != "" {
		l.loggerKeys = append(l.loggerKeys, e.NameKey)
	}
	return nil
}

// of returns the logs of the config that have entries of a logger; all if the server has no such logger.
func (l *logging) of(logger string) []*accessLog {
	if !l.server.has(logger) {
		return l.logs
	}
	return slices.DeleteFunc(slices.Clone(l.logs), func(a *accessLog) bool { return !a.writes(logger) })
}

func (s *serverLogs) has(logger string) bool {
	name, isOther := strings.CutPrefix(logger, "http.log.access.")
	if !isOther {
		return logger == "http.log.access" && s.Default == "" && len(s.ByHost) == 0
	}
	return name == s.Default || slices.ContainsFunc(slices.Collect(maps.Values(s.ByHost)), func(names caddyhttp.StringArray) bool {
		return slices.Contains(names, name)
	})
}

// writes reports whether the log has entries of a logger, as Caddy decides.
func (a *accessLog) writes(logger string) bool {
	longest := func(namespaces []string) (length int) {
		for _, namespace := range namespaces {
			if strings.HasPrefix(logger+".", namespace+".") {
				length = max(length, len(namespace))
			}
		}
		return length
	}
	include, exclude := longest(a.Include), longest(a.Exclude)
	return include > exclude || len(a.Include) == 0 && exclude == 0 && !slices.Contains(a.Exclude, "*")
}

// leavesOut returns why no log of this logger has all requests, once for each reason.
func (l *logging) leavesOut(logger string) (reasons []string) {
	for _, log := range l.of(logger) {
		before := len(reasons)
		if len(log.Sampling) > 0 && string(log.Sampling) != "null" {
			reasons = append(reasons, "sampling of log "+log.name)
		}
		if level := strings.ToUpper(log.Level); level != "" && level != "DEBUG" && level != "INFO" {
			reasons = append(reasons, "level "+level+" of log "+log.name)
		}
		if len(reasons) == before {
			return nil
		}
	}
	return reasons
}

// fields are the fields of an entry that a filter may change, and what is read of them.
var fields = map[string][]string{
	"request>remote_ip":   {"http.request.remote", "http.request.remote.host", "http.request.remote.host."},
	"request>remote_port": {"http.request.remote", "http.request.remote.port"},
	"request>client_ip":   {clientIP},
	"request>proto":       {"http.request.proto", "http.request.proto_name"},
	"request>method":      {"http.request.method", "http.request.orig_method"},
	"request>host":        {"http.request.host", "http.request.host.", "http.request.hostport", "http.request.port"},
	"request>uri":         {"http.request.uri", "http.request.uri.", "http.request.uri_escaped", "http.request.orig_uri", "http.request.orig_uri."},
	"request>headers":     {headerPrefix, cookiePrefix},
	"request>tls":         {"http.request.tls.", "http.request.scheme", matcherPrefix + "protocol", matcherPrefix + "tls"},
	"user_id":             {"http.auth.user.id"},
	"duration":            {durations, "http.rate_limit.response.duration_ms"},
	"size":                {"http.rate_limit.response.size"},
	"status":              {statuses},
	"resp_headers":        {responsePrefix},
}

// changes returns what the config's logs of a logger do with what a zone needs, or "". One of them that does
// nothing may be the replayed one, but not if the server has no such logger: then the config is not known to be that
// of the log. What only the zone's key reads may be hashed.
func (l *logging) changes(z *zone, name, logger string) (first string) {
	isKnown := l.server.has(logger)
	for _, log := range l.of(logger) {
		what := log.changes(z, name)
		if what == "" && isKnown {
			return ""
		}
		first = cmp.Or(first, what)
	}
	return first
}

func (a *accessLog) changes(z *zone, name string) string {
	for e := a.Encoder; e != nil; e = e.Wrap {
		for _, path := range slices.Sorted(maps.Keys(e.Fields)) {
			var f filter
			if e.Format != "filter" || json.Unmarshal(e.Fields[path], &f) != nil {
				continue
			}
			if f.isHash() && slices.Contains(z.onlyInKey, name) {
				continue
			}
			if f.changes(path, name) {
				return "log " + a.name + " has the filter " + f.Filter + " for " + path
			}
		}
	}
	return ""
}

// isHash reports whether different values stay different.
func (f *filter) isHash() bool {
	for _, a := range f.Actions {
		if a.Type != "hash" {
			return false
		}
	}
	return f.Filter == "hash" || len(f.Actions) > 0
}

// changes reports whether the filter of a field changes what a placeholder reads.
func (f *filter) changes(path, name string) bool {
	for field, reads := range fields {
		if (field == path || strings.HasPrefix(field, path+">")) && isPresent(name, reads) {
			return f.Filter != "query" || f.changesQuery(name)
		}
	}
	if header, ok := strings.CutPrefix(path, "request>headers>"); ok {
		if header == "Cookie" && strings.HasPrefix(name, cookiePrefix) {
			return f.Filter != "cookie" || f.names(strings.TrimPrefix(name, cookiePrefix))
		}
		return strings.EqualFold(name, headerPrefix+header) || name == anyHeader
	}
	if header, ok := strings.CutPrefix(path, "resp_headers>"); ok {
		return strings.EqualFold(name, responsePrefix+header)
	}
	return strings.HasPrefix(path, "request>tls>") && isPresent(name, fields["request>tls"])
}

// changesQuery reports whether a filter of parameters changes what a placeholder of the URI reads.
func (f *filter) changesQuery(name string) bool {
	if parameter, ok := strings.CutPrefix(name, queryPrefix); ok {
		return f.names(parameter)
	}
	return !strings.Contains(name, ".uri.path")
}

// names reports whether an action of the filter is about a parameter or cookie.
func (f *filter) names(name string) bool {
	for _, a := range f.Actions {
		if a.Name == name || a.Parameter == name {
			return true
		}
	}
	return false
}
