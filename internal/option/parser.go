package option

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
)

// Parser parses the options of one block of a Caddyfile.
type Parser struct {
	*caddyfile.Dispenser
	start caddyfile.Token
	lines map[string]caddyfile.Token
}

// NewParser returns a parser of the block that follows the current token.
func NewParser(d *caddyfile.Dispenser) *Parser {
	return &Parser{Dispenser: d, lines: map[string]caddyfile.Token{}, start: d.Token()}
}

// IsEmpty reports whether the block has had no option so far.
func (p *Parser) IsEmpty() bool { return len(p.lines) == 0 }

// HasBlock reports whether a block begins after the arguments of the current option.
func (p *Parser) HasBlock() bool {
	d := *p.Dispenser
	line := d.Line()
	return d.Next() && d.Val() == "{" && d.Line() == line
}

// joined returns the option that the line of the current one has as well, after a semicolon, or "".
func (p *Parser) joined(options []string) string {
	d := *p.Dispenser
	args := d.RemainingArgs()
	for i := 1; i < len(args); i++ {
		if strings.HasSuffix(args[i-1], ";") && slices.Contains(options, args[i]) {
			return args[i]
		}
	}
	return ""
}

// StartsAt notes the place of an option that may be given several times.
func (p *Parser) StartsAt(option string, at caddyfile.Token) { p.lines[option] = at }

// once notes the place of the current option, and returns an error the second time.
func (p *Parser) once() error {
	if first, ok := p.lines[p.Val()]; ok {
		return p.Errf("%s is given twice, first in line %d: remove one", p.Val(), first.Line)
	}
	p.lines[p.Val()] = p.Token()
	return nil
}

// At adds to err the place of the option that it names, or that of the block.
func (p *Parser) At(err error) error {
	token := p.start
	var bad *Error
	if errors.As(err, &bad) {
		if option, ok := p.lines[bad.option]; ok {
			token = option
		}
	}
	return ErrorAt(token, err)
}

// ErrorAt adds the place of a token to err.
func ErrorAt(token caddyfile.Token, err error) error {
	d := caddyfile.NewDispenser([]caddyfile.Token{token})
	d.Next()
	return d.WrapErr(err)
}

// Place is where a token is: the file and line, and those of what imports it.
func Place(token caddyfile.Token) string {
	place := fmt.Sprintf("%s:%d", token.File, token.Line)
	// Caddy shows the imports of a token in errors only.
	_, chain, isImported := strings.Cut(ErrorAt(token, errors.New("")).Error(), " import chain ['")
	if !isImported {
		return place
	}
	var imports []string
	for _, text := range strings.Split(strings.TrimSuffix(chain, "']"), "','") {
		at, _, _ := strings.Cut(text, " (import")
		imports = append(imports, at)
	}
	return place + " (imported at " + strings.Join(imports, ", ") + ")"
}

// Arg returns the only argument of an option.
func (p *Parser) Arg() (string, error) {
	option := p.Val()
	args := p.RemainingArgs()
	if len(args) != 1 {
		return "", p.Errf("%s takes one argument, not %d", option, len(args))
	}
	return args[0], nil
}

// NoArgs returns an error if the current option has an argument.
func (p *Parser) NoArgs() error {
	option := p.Val()
	if p.NextArg() {
		return p.Errf("%s takes no argument", option)
	}
	return nil
}

// Setter parses the arguments of the current option and sets its field.
type Setter func(p *Parser) error

// oneArg returns the setter of an option with one argument.
func oneArg(set func(p *Parser, option, arg string) error) Setter {
	return func(p *Parser) error {
		option := p.Val()
		arg, err := p.Arg()
		if err != nil {
			return err
		}
		return set(p, option, arg)
	}
}

// Text is a text, which may be empty.
func Text[T ~string](to *T) Field {
	return Field{
		Set: func(p *Parser) error {
			arg, err := p.Arg()
			*to = T(arg)
			return err
		},
		Text: func() (string, bool) { return string(*to), *to != "" },
	}
}

// Filled is a text. An empty one is an error, because it would mean the default.
func Filled[T ~string](to *T) Field {
	f := Text(to)
	f.Set = oneArg(func(p *Parser, option, arg string) error {
		if arg == "" {
			return p.Errf("%s is empty: give it a value, or remove it", option)
		}
		*to = T(arg)
		return nil
	})
	return f
}

// Choice is one of the words that the Args of its row separate by |.
func Choice[T ~string](to *T) Field {
	f := Filled(to)
	f.choice = func() string { return string(*to) }
	return f
}

// WithText is the field with another text.
func (f Field) WithText(text func() (args string, given bool)) Field {
	f.Text = text
	return f
}

// List is a list of at least one text. An option that is repeated adds to it.
func List[T ~[]string](to *T) Field {
	return Field{
		Set: func(p *Parser) error {
			option := p.Val()
			args := p.RemainingArgs()
			if len(args) == 0 {
				return p.Errf("%s takes at least one argument", option)
			}
			*to = append(*to, args...)
			return nil
		},
		Text: func() (string, bool) {
			var quoted []string
			for _, text := range *to {
				if strings.ContainsAny(text, " \t\n\"`") {
					text = strconv.Quote(text)
				}
				quoted = append(quoted, text)
			}
			return strings.Join(quoted, " "), len(*to) > 0
		},
	}
}

// Flag is a switch, whose option has no argument.
func Flag(to *bool) Field {
	return Field{
		Set: func(p *Parser) error {
			*to = true
			return p.NoArgs()
		},
		Text: func() (string, bool) { return "", *to },
	}
}

// Integer is a whole number.
func Integer(to *int) Field {
	return Field{
		Set: oneArg(func(p *Parser, option, arg string) (err error) {
			if *to, err = strconv.Atoi(arg); err != nil {
				return p.Errf("%s %q: it must be a whole number", option, arg)
			}
			return nil
		}),
		Text: func() (string, bool) { return strconv.Itoa(*to), *to != 0 },
	}
}

// Positive is a whole number. One below 1 is an error, because 0 would mean the
// default.
func Positive(to *int) Field {
	f := Integer(to)
	set := f.Set
	f.Set = func(p *Parser) error {
		option := p.Val()
		if err := set(p); err != nil {
			return err
		}
		if *to < 1 {
			return p.Errf("%s %d: it must be at least 1; remove it for the default", option, *to)
		}
		return nil
	}
	return f
}

// Percent is a whole percentage. One below 1 is an error, because 0 would mean the default.
func Percent(to *int) Field {
	f := Integer(to)
	f.Set = oneArg(func(p *Parser, option, arg string) (err error) {
		if *to, err = WholePercent(arg, "such as 80"); err != nil {
			return p.Errf("%s %w", option, err)
		}
		if *to < 1 {
			return p.Errf("%s %d: it must be from 1 to 100 percent", option, *to)
		}
		return nil
	})
	return f
}

// WholePercent reads a percentage that cannot be a fraction, and asks about one that looks like one. The
// words of an error show another.
func WholePercent(text, words string) (int, error) {
	n, err := strconv.Atoi(text)
	if err == nil {
		return n, nil
	}
	if share, err := strconv.ParseFloat(text, 64); err == nil && share > 0 && share < 1 {
		return 0, fmt.Errorf("%q: it is a percentage, from 1 to 100: is it meant as a fraction? Then write %d", text, max(1, int(math.Round(share*100))))
	}
	return 0, fmt.Errorf("%q: it must be a whole number of percent from 1 to 100, %s", text, words)
}

// Number is a number. The words of an error describe it.
func Number(to *float64, words string) Field {
	return Field{
		Set: oneArg(func(p *Parser, option, arg string) (err error) {
			if *to, err = strconv.ParseFloat(arg, 64); err != nil {
				return p.Errf("%s %q: it must be a number%s", option, arg, words)
			}
			return nil
		}),
		Text: func() (string, bool) { return strconv.FormatFloat(*to, 'g', -1, 64), *to != 0 },
	}
}

// Delay is a time span, which may be zero.
func Delay(to **caddy.Duration) Field {
	return Field{
		Set: oneArg(func(p *Parser, option, arg string) error {
			d, err := caddy.ParseDuration(arg)
			if err != nil || d < 0 {
				return p.Errf("%s %q: it must be a time span, such as 50ms, or 0", option, arg)
			}
			delay := caddy.Duration(d)
			*to = &delay
			return nil
		}),
		Text: func() (string, bool) {
			if *to == nil {
				return "", false
			}
			return time.Duration(**to).String(), true
		},
	}
}

// Duration is a time span. Zero is an error, because it would mean the default.
func Duration(to *caddy.Duration) Field {
	return Field{
		Set: oneArg(func(p *Parser, option, arg string) error {
			d, err := caddy.ParseDuration(arg)
			if err != nil || d <= 0 {
				return p.Errf("%s %q: it must be a time span above zero, such as 250ms, 10s, 1m, 1h or 1d", option, arg)
			}
			*to = caddy.Duration(d)
			return nil
		}),
		Text: func() (string, bool) { return time.Duration(*to).String(), *to != 0 },
	}
}
