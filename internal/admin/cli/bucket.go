package cli

import (
	"fmt"
	"net/http"
	"net/url"
	"time"

	"github.com/spf13/cobra"
)

// buckets is what GET and DELETE /rate_limit/buckets/<zone> answer.
type buckets struct {
	Zone, Store string
	Buckets     []struct {
		copies
		ClientKey string `json:"client_key"`
		Text      string
		Deleted   bool
		// Former is what the shard has that kept the bucket before, Local what this
		// process has counted alone.
		Former *copies
		Local  *state
		Ledger *struct {
			Used, Unsent, Reserved int64
			InFlight               int64 `json:"in_flight"`
			Full                   bool
		}
	}
}

// copies are those of a bucket at the servers of a shard.
type copies struct {
	Shard   string
	Servers []struct {
		Address, Role, Error string
		State                *state
	}
}

type state struct {
	Limit, Used, Remaining int64
	Reset, Penalty         float64
}

// buckets calls the API about the buckets that a command's arguments mean.
func (s *session) buckets(method string, cmd *cobra.Command, args []string) (b buckets, err error) {
	path, err := bucketArgs(cmd, args)
	if err != nil {
		return b, err
	}
	err = s.call(method, path, nil, &b)
	return b, err
}

func getCommand(host Host) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "get <zone> [<value>...]",
		Short: "Shows a client's bucket, on each server",
		Long: `
Shows the bucket of a client in a zone: on the primary, on each replica, and
what the running Caddy knows beyond that.

The values are those of the placeholders of the zone's key, in their order, such
as the client's IP address. --client-key gives the client key itself, as top and
simulate show it. A zone without placeholders in its key needs none.
`,
		Example: "  $ caddy rate-limit get api 203.0.113.7\n  $ caddy rate-limit get login --client-key 'Q1x:alice'",
		Args:    cobra.MinimumNArgs(1),
	}
	bucketFlags(cmd)
	cmd.RunE = host.run(func(s *session, cmd *cobra.Command, args []string) (int, error) {
		b, err := s.buckets(http.MethodGet, cmd, args)
		if err != nil || s.raw {
			return 0, err
		}
		b.show(s)
		return 0, nil
	})
	return cmd
}

func resetCommand(host Host) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "reset <zone> [<value>...]",
		Short: "Empties a client's bucket",
		Long: `
Empties the bucket of a client in a zone, so that the client begins anew, in this
Caddy at once and in others that count in the same shards within a second. It
does not ask whether you are sure. The arguments are those of get.

It exits with status 3 if there is no such zone, and with 4 if the bucket's shard
cannot be reached; then nothing is forgotten.
`,
		Example: "  $ caddy rate-limit reset api 203.0.113.7",
		Args:    cobra.MinimumNArgs(1),
	}
	bucketFlags(cmd)
	cmd.RunE = host.run(func(s *session, cmd *cobra.Command, args []string) (int, error) {
		b, err := s.buckets(http.MethodDelete, cmd, args)
		if err != nil || s.raw {
			return 0, err
		}
		for _, bucket := range b.Buckets {
			what := "deleted"
			if !bucket.Deleted {
				what = "nothing to delete"
			}
			where := ""
			if bucket.Shard != "" {
				where = ", shard " + bucket.Shard
			}
			fmt.Fprintf(s.out, "%s: %s in zone %s of store %s%s\n", what, shown(bucket.ClientKey), shown(b.Zone), shown(b.Store), shown(where))
		}
		return 0, nil
	})
	return cmd
}

func bucketFlags(cmd *cobra.Command) {
	cmd.Flags().String("client-key", "", "The client key, instead of values")
	cmd.Flags().String("store", "", "The store, where a zone counts in several")
}

func bucketArgs(cmd *cobra.Command, args []string) (path string, err error) {
	query := url.Values{}
	for _, value := range args[1:] {
		query.Add("key", value)
	}
	for flag, name := range map[string]string{"client-key": "client_key", "store": "store"} {
		value, err := cmd.Flags().GetString(flag)
		if err != nil {
			return "", err
		}
		if value != "" {
			query.Set(name, value)
		}
	}
	return bucketPath(args[0], query), nil
}

func (b *buckets) show(s *session) {
	now := time.Now()
	for i, bucket := range b.Buckets {
		if i > 0 {
			fmt.Fprintln(s.out)
		}
		fmt.Fprintf(s.out, "%s in zone %s of store %s", shown(bucket.ClientKey), shown(b.Zone), shown(b.Store))
		if bucket.Text != "" {
			fmt.Fprintf(s.out, ", key %s", shown(bucket.Text))
		}
		if bucket.Shard != "" {
			fmt.Fprintf(s.out, ", shard %s", shown(bucket.Shard))
		}
		fmt.Fprintln(s.out)
		t := newTable(s.out, "SERVER", "ROLE", "LIMIT", "USED", "REMAINING", "RESET", "PENALTY")
		bucket.rows(t, "", now)
		if bucket.Former != nil {
			bucket.Former.rows(t, "former ", now)
		}
		if bucket.Local != nil {
			bucket.Local.row(t, "(memory)", "local", now)
		}
		t.end()
		if l := bucket.Ledger; l != nil {
			fmt.Fprintf(s.out, "ledger: %d used, %d in flight, %d unsent, %d reserved", l.Used, l.InFlight, l.Unsent, l.Reserved)
			if l.Full {
				fmt.Fprint(s.out, ", known to be full")
			}
			fmt.Fprintln(s.out)
		}
	}
}

// rows shows the copies, each with its role.
func (c *copies) rows(t *table, prefix string, now time.Time) {
	for _, server := range c.Servers {
		address := or(server.Address, "(memory)")
		if server.Error != "" {
			t.row(address, prefix+server.Role, "error: "+server.Error)
		} else {
			server.State.row(t, address, prefix+server.Role, now)
		}
	}
}

func (st *state) row(t *table, address, role string, now time.Time) {
	if st == nil {
		t.row(address, role, "-", "0", "-", "-", "-")
		return
	}
	t.row(address, role, number(st.Limit), number(st.Used), number(st.Remaining), until(st.Reset, now), until(st.Penalty, now))
}
