package cli

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"
)

// live is how often a view is shown.
type live struct {
	count    int // 0 for until the user has enough
	interval time.Duration
}

// liveFlags adds the flags that readLive reads.
func liveFlags(cmd *cobra.Command) {
	cmd.Flags().Int("count", 0, "End after so many views")
	cmd.Flags().Duration("interval", time.Second, "How often the view is renewed")
}

func readLive(cmd *cobra.Command) (l live, err error) {
	if l.count, err = cmd.Flags().GetInt("count"); err == nil {
		l.interval, err = cmd.Flags().GetDuration("interval")
	}
	switch {
	case err != nil:
	case l.count < 0:
		err = fmt.Errorf("--count %d: it must be at least 1", l.count)
	case l.interval < 100*time.Millisecond:
		err = fmt.Errorf("--interval %v: it must be at least 100ms", l.interval)
	}
	return l, err
}

// show shows a view again and again: on a terminal in the same place, else one
// below the other. It ends when the user wants it to, and is no failure then.
func (l live) show(s *session, view func(out *session) error) error {
	ticks := time.NewTicker(l.interval)
	defer ticks.Stop()
	again := isTerminal(s.out) && !s.raw
	for n := 1; ; n++ {
		// As a whole, so that it does not flicker.
		var page bytes.Buffer
		shot := *s
		shot.out = &page
		if err := view(&shot); err != nil {
			switch {
			case s.ctx.Err() != nil:
				return nil
			case n == 1 || l.count > 0 || !again:
				return err
			}
			// Caddy may be restarting, which is when somebody watches.
			page.Reset()
			fmt.Fprintln(&page, "Error:", err)
		}
		switch {
		case again:
			fmt.Fprint(s.out, "\x1b[H\x1b[2J")
		case n > 1 && !s.raw:
			fmt.Fprintln(s.out)
		}
		if _, err := page.WriteTo(s.out); err != nil {
			return err
		}
		if n == l.count {
			return nil
		}
		select {
		case <-s.ctx.Done():
			return nil
		case <-ticks.C:
		}
	}
}

func isTerminal(out io.Writer) bool {
	f, ok := out.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}
