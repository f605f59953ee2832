package option

import (
	"errors"
	"slices"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
)

// Parser parses the options of one block, each of which may be given once.
type Parser struct {
	*caddyfile.Dispenser
	start caddyfile.Token
	lines map[string]caddyfile.Token
}

// NewParser returns a parser of the block that follows the current token.
func NewParser(d *caddyfile.Dispenser) *Parser {
	return &Parser{Dispenser: d, lines: map[string]caddyfile.Token{}, start: d.Token()}
}

// StartsAt notes where an option stands that may be given several times.
func (p *Parser) StartsAt(option string, at caddyfile.Token) { p.lines[option] = at }

// Once notes that the current token is an option, and refuses it the second
// time.
func (p *Parser) Once() error {
	if first, ok := p.lines[p.Val()]; ok {
		return p.Errf("%s is given twice, first in line %d: remove one", p.Val(), first.Line)
	}
	p.lines[p.Val()] = p.Token()
	return nil
}

// At adds to err the place of the option it is about, or that of the block.
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

func ErrorAt(token caddyfile.Token, err error) error {
	d := caddyfile.NewDispenser([]caddyfile.Token{token})
	d.Next()
	return d.WrapErr(err)
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

// Args returns the arguments of an option that takes one or more.
func (p *Parser) Args() ([]string, error) {
	option := p.Val()
	args := p.RemainingArgs()
	if len(args) == 0 {
		return nil, p.Errf("%s takes at least one argument", option)
	}
	return args, nil
}

// Text sets an option that is a text.
func (p *Parser) Text(to *string) (err error) {
	*to, err = p.Arg()
	return err
}

// Filled sets an option that is a text, of which none would mean the default.
func (p *Parser) Filled(to *string) error {
	option := p.Val()
	if err := p.Text(to); err != nil {
		return err
	}
	if *to == "" {
		return p.Errf("%s is empty: give it a value, or remove it", option)
	}
	return nil
}

// Integer sets an option that is a whole number.
func (p *Parser) Integer(to *int) error {
	option := p.Val()
	text, err := p.Arg()
	if err != nil {
		return err
	}
	if *to, err = strconv.Atoi(text); err != nil {
		return p.Errf("%s %q: it must be a whole number", option, text)
	}
	return nil
}

// Positive sets an option that is a whole number of at least 1, where 0 would
// mean the default.
func (p *Parser) Positive(to *int) error {
	option := p.Val()
	if err := p.Integer(to); err != nil {
		return err
	}
	if *to < 1 {
		return p.Errf("%s %d: it must be at least 1", option, *to)
	}
	return nil
}

// Positive64 is positive for numbers up to 2^52.
func (p *Parser) Positive64(to *int64) error {
	option := p.Val()
	text, err := p.Arg()
	if err != nil {
		return err
	}
	if *to, err = strconv.ParseInt(text, 10, 64); err != nil || *to < 1 {
		return p.Errf("%s %q: it must be a whole number from 1 to 2^52", option, text)
	}
	return nil
}

// Duration sets an option that is a time span, of which 0 would mean the
// default.
func (p *Parser) Duration(to *caddy.Duration) error {
	option := p.Val()
	text, err := p.Arg()
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

// Unknown is the error about an option that does not exist here. It may be one
// of those that belong elsewhere.
func (p *Parser) Unknown(known, elsewhere, place string) error {
	switch {
	case p.Val() == "{":
		return p.Err("the option before { takes no block: remove it")
	case p.Val() != "" && slices.Contains(strings.Split(elsewhere, ", "), p.Val()):
		return p.Errf("%s belongs into %s", p.Val(), place)
	}
	return p.Errf("unknown option %s: it must be one of %s%s", p.Val(), known, DidYouMean(p.Val(), strings.Split(known, ", ")))
}

func (p *Parser) NoArgs() error {
	option := p.Val()
	if p.NextArg() {
		return p.Errf("%s takes no argument", option)
	}
	return nil
}

// More adds the arguments of an option that may be repeated.
func (p *Parser) More(to *[]string) error {
	args, err := p.Args()
	*to = append(*to, args...)
	return err
}
