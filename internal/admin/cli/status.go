package cli

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
)

// status is what GET /rate_limit/ answers.
type status struct {
	Zones []struct {
		Name, Store, Algorithm, Charge string
		Key                            []string
		Events                         amount
		Window                         float64
		Enforce                        float64
		Decisions                      decisions
	}
	Stores []storeStatus
}

// amount is a number, or a text with placeholders.
type amount string

// UnmarshalJSON implements [json.Unmarshaler].
func (a *amount) UnmarshalJSON(b []byte) error {
	if len(b) > 0 && b[0] == '"' {
		return json.Unmarshal(b, (*string)(a))
	}
	*a = amount(b)
	return nil
}

type decisions struct {
	Allowed, Refused int64
	WouldRefuse      int64 `json:"would_refuse"`
	ErrorAllowed     int64 `json:"error_allowed"`
	ErrorRefused     int64 `json:"error_refused"`
}

type storeStatus struct {
	Name, Module string
	Buckets      *int64
	Shards       []shardStatus
	Ledger       *struct {
		Buckets           int64
		InFlight          int64 `json:"in_flight"`
		Unsent, Uncertain int64
		LocalRefusals     int64 `json:"local_refusals"`
		UnaskedAdmissions int64 `json:"unasked_admissions"`
	}
}

type shardStatus struct {
	Name, Kind     string
	Retired, Found bool
	Servers        []struct {
		Address, Role, State string
		Breakers             map[string]string
		LagSeconds           *float64           `json:"lag_seconds"`
		LatencySeconds       map[string]float64 `json:"latency_seconds"`
		Queued               int64
	}
}

func statusCommand(host Host) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Shows zones, stores, and how the shards are",
		Args:  cobra.NoArgs,
	}
	cmd.Flags().BoolP("watch", "w", false, "Show it again and again, until Ctrl-C")
	liveFlags(cmd)
	cmd.RunE = host.run(func(s *session, cmd *cobra.Command, _ []string) (int, error) {
		l, err := readLive(cmd)
		if err != nil {
			return 0, err
		}
		if watch, err := cmd.Flags().GetBool("watch"); err != nil {
			return 0, err
		} else if !watch && l.count == 0 {
			l.count = 1
		}
		return 0, l.show(s, showStatus)
	})
	return cmd
}

func showStatus(s *session) error {
	var st status
	if err := s.call(http.MethodGet, root, nil, &st); err != nil || s.raw {
		return err
	}
	t := newTable(s.out, "ZONE", "STORE", "ALGORITHM", "EVENTS", "WINDOW", "ENFORCED", "ALLOWED", "REFUSED", "WOULD REFUSE", "ERRORS")
	for _, z := range st.Zones {
		d := z.Decisions
		t.row(z.Name, z.Store, z.Algorithm, string(z.Events), seconds(z.Window), strconv.FormatFloat(z.Enforce, 'g', 6, 64)+"%",
			number(d.Allowed), number(d.Refused), number(d.WouldRefuse), number(d.ErrorAllowed+d.ErrorRefused))
	}
	t.end()
	for i := range st.Stores {
		fmt.Fprintln(s.out)
		st.Stores[i].show(s)
	}
	return nil
}

func (st *storeStatus) show(s *session) {
	fmt.Fprintf(s.out, "store %s (%s)", shown(st.Name), shown(strings.TrimPrefix(st.Module, "rate_limit.stores.")))
	if st.Buckets != nil {
		fmt.Fprintf(s.out, ": %d buckets", *st.Buckets)
	}
	fmt.Fprintln(s.out)
	if l := st.Ledger; l != nil {
		fmt.Fprintf(s.out, "ledger: %d buckets, %d in flight, %d unsent, %d uncertain, %d refused and %d admitted without a call\n",
			l.Buckets, l.InFlight, l.Unsent, l.Uncertain, l.LocalRefusals, l.UnaskedAdmissions)
	}
	if len(st.Shards) == 0 {
		return
	}
	t := newTable(s.out, "SHARD", "KIND", "SERVER", "ROLE", "STATE", "BREAKERS", "LAG", "CHECKS", "CHARGES", "QUEUED")
	for i := range st.Shards {
		sh := &st.Shards[i]
		name, kind := sh.Name, sh.Kind
		if sh.Retired {
			kind += ", retired"
		}
		if !sh.Found || len(sh.Servers) == 0 {
			t.row(name, kind, "-", "-", "not found")
		}
		for _, v := range sh.Servers {
			lag := "-"
			if v.LagSeconds != nil {
				lag = strconv.FormatFloat(*v.LagSeconds, 'f', 1, 64) + "s"
			}
			t.row(name, kind, v.Address, v.Role, v.State, breakers(v.Breakers), lag,
				or(seconds(v.LatencySeconds["checks"]), "-"), or(seconds(v.LatencySeconds["charges"]), "-"), number(v.Queued))
		}
	}
	t.end()
}

// breakers names those that are not closed.
func breakers(states map[string]string) string {
	var open []string
	for _, purpose := range []string{"checks", "charges"} {
		if state := states[purpose]; state != "" && state != "closed" {
			open = append(open, purpose+" "+state)
		}
	}
	return or(strings.Join(open, ", "), "closed")
}

func or(text, otherwise string) string {
	if text == "" {
		return otherwise
	}
	return text
}
