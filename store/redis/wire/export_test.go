package wire

import "time"

// NewClock returns a clock that reads at instants after start.
func NewClock(start time.Time) *Clock { return &Clock{start: start} }

// Bundle returns the text of the script that does the same for several buckets, or an empty
// one.
func (s *Script) Bundle() string {
	if s.bundle == nil {
		return ""
	}
	return s.bundle.source
}

// Offline runs commands as a lane does, without its connection.
type Offline struct {
	// Send runs a command of Redis, and returns the reply, which may be an error. Answer runs
	// one of the store.
	Send   func(words ...any) any
	Answer func(cmd *Command)
	// Now is the clock of the callers.
	Now func() time.Time
	// Estimate returns the time of the clock that decides, or 0 while it is not known.
	Estimate func() int64
	// Clock is that of the commands, or nil.
	Clock *Clock
	// Bundles is set if scripts are called for several buckets at once.
	Bundles bool
}

// Execute is pipeline and exec of a lane.
func (o *Offline) Execute(cmds []*Command) {
	for _, cmd := range cmds {
		if cmd.charge != nil {
			cmd.CheckWindow(o.Estimate())
		}
	}
	var bundles []*bundle
	others := cmds
	if o.Bundles && len(cmds) > 1 {
		bundles, others = newBundles(cmds)
	}
	passed := int64(0)
	if o.Clock != nil {
		passed = o.Clock.passed(o.Now())
	}
	for _, b := range bundles {
		o.run(b)
	}
	for _, cmd := range others {
		if cmd.asksClock() {
			cmd.stamp(passed)
		}
		o.Answer(cmd)
	}
	observe(cmds, o.Now(), o.Now())
}

func (o *Offline) run(b *bundle) {
	switch reply := o.Send(plainWords(b.Args())...).(type) {
	case error:
		b.SetErr(reply)
	default:
		b.SetVal(reply)
	}
	b.share()
	for _, cmd := range b.members {
		cmd.settleOutcome(nil)
	}
}
