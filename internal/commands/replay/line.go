package replay

import (
	"cmp"
	"crypto/tls"
	"net/http"
	"net/netip"
	"net/textproto"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Line is a request of a log.
type Line struct {
	Format Format
	// Logger wrote the entry, if it is Caddy's.
	Logger string
	// At is when the request arrived, and End when its response had ended, in nanoseconds since the
	// epoch.
	At, End int64
	// Remote is the address of the connection, and Client what the server took for the client's.
	Remote, Port, Client           string
	Proto, Method, Host, URI, User string
	TLS                            *tls.ConnectionState
	Header, Response               http.Header
	Status                         int
	Size                           int64
	// refused is set if a limit refused the request when it was logged.
	refused bool
	// flaw is what makes the line unreadable, if that is known.
	flaw string
	// state is what TLS points to.
	state tls.ConnectionState
}

// reuse makes l an empty line, in the memory of the one before.
func (l *Line) reuse() {
	header, response := l.Header, l.Response
	if len(header) > 0 {
		clear(header)
	}
	if len(response) > 0 {
		clear(response)
	}
	*l = Line{Header: header, Response: response}
}

// Format is the format of a log.
type Format string

// Formats of logs.
const (
	Caddy    Format = "caddy"
	Combined Format = "combined"
)

// origin is what lines with the same fields have in common.
type origin struct {
	format Format
	logger string
}

func (l *Line) origin() origin { return origin{l.Format, l.Logger} }

// formatOf returns the format of a line.
func formatOf(text string) Format {
	if strings.HasPrefix(strings.TrimLeft(text, " \t"), "{") {
		return Caddy
	}
	return Combined
}

// reading is what became of a line.
type reading uint8

const (
	isRequest reading = iota
	// isOther is an entry of Caddy's log that is about no request.
	isOther
	isUnreadable
)

// reader reads lines.
type reader struct {
	// wanted are the names of the headers that zones and matchers read, of requests and responses;
	// all are if isAll is set.
	wanted, wantedResponse []string
	isAll                  bool
	*logging
	dates dateReader
}

// read reads a line.
func (r *reader) read(text string, l *Line) reading {
	if l.Format = formatOf(text); l.Format == Caddy {
		return r.readCaddy(text, l)
	}
	return r.readCombined(text, l)
}

// readCaddy reads an entry of Caddy's log, in JSON.
func (r *reader) readCaddy(text string, l *Line) reading {
	s := scanner{text: text}
	var hasRequest, hasTime, isTimed, isForeign bool
	var took int64
	s.object(func(key string) {
		switch r.nameOf(key) {
		case "logger":
			// Errors have a request too.
			l.Logger, _ = s.scalar()
			isForeign = !strings.HasPrefix(l.Logger, "http.log.access")
		case "ts":
			at, isString := s.scalar()
			if l.End, hasTime = r.instant(at, isString); !hasTime {
				l.flaw = "its time " + clip(at) + " is no date by a format of Caddy's or the time_format of the config's logs"
			}
		case "duration":
			text, isString := s.scalar()
			if took, isTimed = r.duration(text, isString); !isTimed {
				l.flaw = "its duration " + clip(text) + " is none by the duration_format of the config's logs"
			}
		case "status":
			l.Status, _ = strconv.Atoi(s.literal())
		case "size":
			l.Size, _ = strconv.ParseInt(s.literal(), 10, 64)
		case "user_id":
			l.User, _ = s.scalar()
		case "request":
			hasRequest = true
			r.readRequest(&s, l)
		case "resp_headers":
			l.Response = r.readHeader(&s, r.wantedResponse, l.Response)
		case "rate_limit":
			l.refused = readOutcome(&s)
		default:
			s.skip()
		}
	})
	switch {
	case s.bad:
		return isUnreadable
	case !hasRequest || isForeign:
		return isOther
	case !hasTime:
		l.flaw = cmp.Or(l.flaw, "it has no field ts, nor one of the time_key of the config's logs")
		return isUnreadable
	case !isTimed:
		l.flaw = cmp.Or(l.flaw, "it has no field duration")
		return isUnreadable
	case l.Method == "" || l.URI == "":
		l.flaw = "it has no method or URI"
		return isUnreadable
	}
	if l.Client == "" {
		l.Client = l.Remote
	}
	l.At, l.End = rounded(l.End-took), rounded(l.End)
	return isRequest
}

// nameOf returns the default name of a field of an entry.
func (l *logging) nameOf(key string) string {
	switch {
	case slices.Contains(l.timeKeys, key):
		return "ts"
	case slices.Contains(l.loggerKeys, key):
		return "logger"
	}
	return key
}

// rounded rounds to microseconds, by which stores count: the numbers of a log are off by a quarter of one,
// because ts is a float64.
func rounded(nanos int64) int64 { return (nanos + 500) / 1000 * 1000 }

func (r *reader) readRequest(s *scanner, l *Line) {
	s.object(func(key string) {
		switch key {
		case "remote_ip":
			l.Remote, _ = s.scalar()
		case "remote_port":
			l.Port, _ = s.scalar()
		case "client_ip":
			l.Client, _ = s.scalar()
		case "proto":
			l.Proto, _ = s.scalar()
		case "method":
			l.Method, _ = s.scalar()
		case "host":
			l.Host, _ = s.scalar()
		case "uri":
			l.URI, _ = s.scalar()
		case "headers":
			l.Header = r.readHeader(s, r.wanted, l.Header)
		case "tls":
			l.TLS = &l.state
			readTLS(s, l.TLS)
		default:
			s.skip()
		}
	})
}

// readHeader adds the fields that are wanted to h, which may be nil, and returns it.
func (r *reader) readHeader(s *scanner, wanted []string, h http.Header) http.Header {
	s.object(func(name string) {
		if name = r.want(name, wanted); name == "" {
			s.skip()
			return
		}
		if h == nil {
			h = http.Header{}
		}
		if s.next() != '[' {
			// A filter of the log has made one text of the values.
			value, _ := s.scalar()
			h[name] = append(h[name], value)
			return
		}
		s.list(func() {
			value, _ := s.scalar()
			h[name] = append(h[name], value)
		})
	})
	return h
}

// want returns the canonical name of a header that is wanted, and otherwise "".
func (r *reader) want(name string, wanted []string) string {
	if r.isAll {
		return textproto.CanonicalMIMEHeaderKey(name)
	}
	for _, w := range wanted {
		if len(w) == len(name) && strings.EqualFold(w, name) {
			return w
		}
	}
	return ""
}

func readTLS(s *scanner, state *tls.ConnectionState) {
	*state = tls.ConnectionState{HandshakeComplete: true}
	number := func() uint16 {
		n, _ := strconv.ParseUint(s.literal(), 10, 16)
		return uint16(n)
	}
	s.object(func(key string) {
		switch key {
		case "resumed":
			state.DidResume = s.literal() == "true"
		case "version":
			state.Version = number()
		case "cipher_suite":
			state.CipherSuite = number()
		case "proto":
			state.NegotiatedProtocol, _ = s.scalar()
		case "server_name":
			state.ServerName, _ = s.scalar()
		default:
			s.skip()
		}
	})
}

// readOutcome reads what rate_limit has added to the entry, and reports whether it ended the request.
func readOutcome(s *scanner) (refused bool) {
	s.object(func(key string) {
		if key != "outcome" {
			s.skip()
			return
		}
		outcome, _ := s.scalar()
		refused = outcome == "refused" || outcome == "blocked" || outcome == "error_refused"
	})
	return refused
}

// Numbers from these on are milliseconds or nanoseconds since the epoch, by time_format, and not
// seconds.
const (
	leastMillis = 1e11
	leastNanos  = 1e17
)

// layouts are those of Caddy's values of time_format. The fraction of a second need not be in one.
var layouts = []string{time.RFC3339Nano, "2006-01-02T15:04:05.000Z0700", "02/Jan/2006:15:04:05 -0700", "2006/01/02 15:04:05"}

// instant returns the instant of ts, in nanoseconds since the epoch.
func (l *logging) instant(text string, isString bool) (nanos int64, ok bool) {
	if isString {
		if nanos = parsed(text, layouts); nanos == 0 {
			nanos = parsed(text, l.layouts)
		}
		return nanos, nanos > 0
	}
	whole, _, _ := strings.Cut(text, ".")
	switch n, err := strconv.ParseInt(whole, 10, 64); {
	case err != nil || n < 0:
		return decimal(text, 9)
	case n >= leastNanos:
		return n, true
	case n >= leastMillis:
		return decimal(text, 6)
	}
	return decimal(text, 9)
}

// parsed returns the instant of a text in one of these layouts; 0 if it has none. A layout without a date
// has none.
func parsed(text string, layouts []string) int64 {
	for _, layout := range layouts {
		if at, err := time.Parse(layout, text); err == nil && at.Unix() > 0 && at.Unix() < mostInstant/1e9 {
			return at.UnixNano()
		}
	}
	return 0
}

// duration returns a duration in nanoseconds. In milliseconds or nanoseconds, Caddy writes whole
// numbers; in seconds, fractions.
func (r *reader) duration(text string, isString bool) (nanos int64, ok bool) {
	switch {
	case isString:
		d, err := time.ParseDuration(text)
		return int64(d), err == nil
	case r.unit != 0 && !strings.ContainsAny(text, ".eE"):
		n, err := strconv.ParseInt(text, 10, 64)
		return n * int64(r.unit), err == nil && n >= 0 && n <= mostInstant/int64(r.unit)
	}
	return decimal(text, 9)
}

// mostInstant is the year 2200: what is later overflows, or is no time of a log.
const mostInstant = 7_258_118_400_000_000_000

// decimal returns a number, not below 0, times a power of ten. It reads digits, because the nearest
// float64 of an instant may be another microsecond.
func decimal(text string, power int) (n int64, ok bool) {
	if strings.ContainsAny(text, "eE") {
		f, err := strconv.ParseFloat(text, 64)
		for range power {
			f *= 10
		}
		return int64(f), err == nil && f >= 0 && f < mostInstant
	}
	whole, fraction, _ := strings.Cut(text, ".")
	if len(fraction) > power {
		fraction = fraction[:power]
	}
	for _, digits := range []string{whole, fraction} {
		for i := range len(digits) {
			if digits[i] < '0' || digits[i] > '9' || n > mostInstant/10 {
				return 0, false
			}
			n = n*10 + int64(digits[i]-'0')
		}
	}
	for range power - len(fraction) {
		if n > mostInstant/10 {
			return 0, false
		}
		n *= 10
	}
	return n, whole != "" && n <= mostInstant
}

// readCombined reads a line of the combined format of Apache and nginx, or of the common one.
func (r *reader) readCombined(text string, l *Line) reading {
	remote, rest, _ := strings.Cut(text, " ")
	_, rest, _ = strings.Cut(rest, " ")
	l.Remote, l.Client = remote, remote
	user, rest, _ := strings.Cut(rest, " [")
	if user != "-" {
		l.User = user
	}
	date, rest, ok := strings.Cut(rest, `] "`)
	if !ok || !r.dates.read(date, l) {
		return isUnreadable
	}
	request, rest, ok := cutQuoted(rest)
	if !ok || !l.setTarget(request) {
		return isUnreadable
	}
	status, rest, _ := strings.Cut(strings.TrimLeft(rest, " "), " ")
	var err error
	if l.Status, err = strconv.Atoi(status); err != nil {
		return isUnreadable
	}
	size, rest, _ := strings.Cut(rest, ` "`)
	l.Size, _ = strconv.ParseInt(size, 10, 64)
	referer, rest, ok := cutQuoted(rest)
	if !ok {
		return isRequest
	}
	r.addHeader(l, "Referer", referer)
	if _, rest, ok = strings.Cut(rest, `"`); ok {
		agent, _, _ := cutQuoted(rest)
		r.addHeader(l, "User-Agent", agent)
	}
	return isRequest
}

func (r *reader) addHeader(l *Line, name, value string) {
	if value == "-" || r.want(name, r.wanted) == "" {
		return
	}
	if l.Header == nil {
		l.Header = http.Header{}
	}
	l.Header[name] = []string{value}
}

// setTarget sets what a request line says.
func (l *Line) setTarget(request string) bool {
	var ok bool
	if l.Method, request, ok = strings.Cut(request, " "); !ok || l.Method == "" {
		return false
	}
	at := strings.LastIndexByte(request, ' ')
	if at < 0 || !strings.HasPrefix(request[at+1:], "HTTP/") {
		return false
	}
	l.URI, l.Proto = request[:at], request[at+1:]
	return l.URI != ""
}

// cutQuoted returns what is before the closing quote, without the escapes of Apache and nginx, and
// what is behind it.
func cutQuoted(text string) (value, rest string, ok bool) {
	for i := 0; i < len(text); i++ {
		switch text[i] {
		case '\\':
			i++
		case '"':
			if value = text[:i]; strings.IndexByte(value, '\\') >= 0 {
				value = unescaped(value)
			}
			return value, text[i+1:], true
		}
	}
	return "", text, false
}

func unescaped(text string) string {
	var plain strings.Builder
	for text != "" {
		c, _, rest, err := strconv.UnquoteChar(text, '"')
		if err != nil {
			return text
		}
		if c < 0x100 && strings.HasPrefix(text, `\x`) {
			plain.WriteByte(byte(c))
		} else {
			plain.WriteRune(c)
		}
		text = rest
	}
	return plain.String()
}

// dateReader reads dates of the common format. Many lines have the same.
type dateReader struct {
	last string
	at   int64
}

func (d *dateReader) read(text string, l *Line) bool {
	if text != d.last {
		at, err := time.Parse("02/Jan/2006:15:04:05 -0700", text)
		if err != nil {
			return false
		}
		d.last, d.at = text, at.UnixNano()
	}
	l.At, l.End = d.at, d.at
	return d.at >= 0 && d.at <= mostInstant
}

// isAddress reports whether the log has the client's address as it was.
func (l *Line) isAddress() bool {
	_, err := netip.ParseAddr(l.Client)
	return err == nil
}
