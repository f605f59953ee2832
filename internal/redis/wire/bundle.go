package wire

import (
	"bytes"
	"context"

	goredis "github.com/redis/go-redis/v9"
)

// maxBundle bounds the buckets of one call of a script, which blocks its server
// for less than a millisecond.
const maxBundle = 100

// bundle is several commands of one script, sent as one call of it. That saves the
// server a third of its time, and go-redis most of its own.
type bundle struct {
	*goredis.Cmd
	members []*Command
}

// newBundles bundles commands. Those that stay alone are among the others.
func newBundles(cmds []*Command) (bundles []*bundle, others []*Command) {
	others = make([]*Command, 0, len(cmds))
	for _, c := range cmds {
		if c.script == nil || c.script.bundle == nil || c.args[placeOfWord] != wordEvalSHA {
			others = append(others, c)
			continue
		}
		// Into the last one that it fits into, or a new one.
		i := len(bundles) - 1
		for i >= 0 && !bundles[i].goesWith(c) {
			i--
		}
		if i < 0 {
			i, bundles = len(bundles), append(bundles, new(bundle))
		}
		bundles[i].members = append(bundles[i].members, c)
	}
	several := bundles[:0]
	for _, b := range bundles {
		if len(b.members) == 1 {
			others = append(others, b.members[0])
			continue
		}
		b.write()
		several = append(several, b)
	}
	return several, others
}

func (b *bundle) goesWith(c *Command) bool {
	m := b.members[0]
	return c.script == m.script && c.Clock == m.Clock && c.args[placeOfOperation] == m.args[placeOfOperation] && len(c.packed) == len(m.packed) && len(b.members) < maxBundle
}

func (b *bundle) write() {
	first := b.members[0]
	args := make([]any, 0, len(b.members)+len(first.args))
	args = append(args, wordEvalSHA, first.script.bundle.sha, len(b.members))
	same := true
	for _, m := range b.members {
		args = append(args, &m.key)
		same = same && bytes.Equal(m.packed, first.packed)
	}
	args = append(args, first.args[placeOfOperation])
	if same {
		args = append(args, &first.packed)
	} else {
		numbers := make([]byte, 0, len(b.members)*len(first.packed))
		for _, m := range b.members {
			numbers = append(numbers, m.packed...)
		}
		args = append(args, numbers, wordEach)
	}
	b.Cmd = goredis.NewCmd(context.Background(), args...)
}

// share gives each member its part of the reply, or the error.
func (b *bundle) share() {
	reply, err := b.Result()
	texts, _ := reply.(string)
	list, _ := reply.([]any)
	size := len(texts) / len(b.members)
	for i, m := range b.members {
		switch {
		case err != nil:
			m.failure = err
		case len(list) == len(b.members):
			m.reply, _ = list[i].(string)
			m.failure, _ = list[i].(error)
		default:
			m.reply = texts[i*size : (i+1)*size]
		}
	}
}

// NoRetry keeps go-redis from repeating a bundle that may have run.
func (b *bundle) NoRetry() bool { return true }

// Args is called by go-redis to write the bundle to a connection: from then on its
// members may have run.
func (b *bundle) Args() []any {
	for _, m := range b.members {
		m.sent = true
	}
	return b.Cmd.Args()
}
