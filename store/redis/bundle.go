package redis

import (
	"context"

	goredis "github.com/redis/go-redis/v9"
)

// maxBundle bounds the buckets of one call of a script, during which its server
// answers nobody else, which is less than a millisecond.
const maxBundle = 100

// bundle is several commands of one script that are sent as one call of it. That
// saves the server a third of its time, and go-redis most of its own.
type bundle struct {
	*goredis.Cmd
	members []*command
}

// canBundle tells whether the lane's commands can be sent together. In a Redis
// Cluster, and behind some proxies, the keys of a call have to be of one slot.
func (l *lane) canBundle() bool { return l.batch > 1 && l.shard.cluster == nil && !l.splits.Load() }

// isBundled tells whether c can be sent together with others.
func (c *command) isBundled() bool {
	return c.script != nil && c.script.bundle != nil && c.args[placeOfWord] == wordEvalSHA
}

// goesWith tells whether b can take in c.
func (b *bundle) goesWith(c *command) bool {
	m := b.members[0]
	return c.script == m.script && c.args[placeOfOperation] == m.args[placeOfOperation] && len(b.members) < maxBundle
}

// newBundles puts together what can be sent together. Those that are alone in
// theirs, and the others, are left as they are.
func newBundles(cmds []*command) (bundles []*bundle, others []*command) {
	others = make([]*command, 0, len(cmds))
	for _, c := range cmds {
		if !c.isBundled() {
			others = append(others, c)
			continue
		}
		bundles = putTogether(bundles, c)
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

// putTogether adds c to the last bundle that can take it in, or to a new one.
func putTogether(bundles []*bundle, c *command) []*bundle {
	for i := len(bundles) - 1; i >= 0; i-- {
		if b := bundles[i]; b.goesWith(c) {
			b.members = append(b.members, c)
			return bundles
		}
	}
	return append(bundles, &bundle{members: []*command{c}})
}

// write makes the command that is sent.
func (b *bundle) write() {
	first := b.members[0]
	args := make([]any, 0, len(b.members)+len(first.args)-1)
	args = append(args, wordEvalSHA, first.script.bundle.sha, len(b.members))
	numbers := make([]byte, 0, len(b.members)*len(first.packed))
	for _, m := range b.members {
		args = append(args, &m.key)
		numbers = append(numbers, m.packed...)
	}
	b.Cmd = goredis.NewCmd(context.Background(), append(args, first.args[placeOfOperation], numbers)...)
	b.SetFirstKeyPos(first.firstKey)
}

// share gives each member its part of the reply, or the error.
func (b *bundle) share() {
	reply, err := b.Result()
	texts, _ := reply.(string)
	list, _ := reply.([]any)
	size := len(texts) / len(b.members)
	for i, m := range b.members {
		cmd := m.Cmder.(*goredis.StringCmd)
		switch {
		case err != nil:
			cmd.SetErr(err)
		case len(list) == len(b.members):
			if failure, ok := list[i].(error); ok {
				cmd.SetErr(failure)
			} else if text, ok := list[i].(string); ok {
				cmd.SetVal(text)
			}
		default:
			cmd.SetVal(texts[i*size : (i+1)*size])
		}
	}
}

// NoRetry keeps go-redis from sending again what may already have run.
func (b *bundle) NoRetry() bool { return true }

// Args is what go-redis calls to write the bundle to a connection: from then on
// its members may have run.
func (b *bundle) Args() []any {
	for _, m := range b.members {
		m.sent = true
	}
	return b.Cmd.Args()
}

var _ goredis.Cmder = (*bundle)(nil)
