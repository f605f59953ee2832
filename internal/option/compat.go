package option

import "cmp"

const (
	insteadAddress = "write url redis://<host:port> or, in the block of a shard, primary <host:port>"
	insteadAmount  = "write events <n> and window <duration>"
	insteadErrors  = "write handle_errors in the site: its routes answer refused requests"
	insteadDryRun  = "write enforce 0"
	insteadMatch   = "write match with a matcher that leaves out the requests that are not limited, such as not remote_ip 10.0.0.0/8"
)

// instead says what to write in place of names that are no options: those of earlier
// versions, and those of other programs.
var instead = map[string]string{
	"align":          "write window <duration> aligned",
	"batch_share":    "remove it: the batches of all Caddys hold 10 percent of events",
	"free_status":    "write count_status not and the statuses, such as count_status not 304 5xx (in JSON count_status_not); for none write count_status all",
	"max_wait_queue": "write it after the duration, as in max_wait 5s 1000",
	"settle_buffer":  "remove it: bodies of any length are read",
	"settle":         "remove it: the end of a response is awaited where cost or a status needs it",
	"time_zone":      "write it after the window, as in window day in Europe/Berlin",
	"week_starts":    "write it after the window, as in window week from sunday",

	"clock":              "remove it: windows end by the clock of the primary",
	"dial_timeout":       "remove it, or raise check_timeout: connecting may take four times as long",
	"ledger_max_buckets": "write max_buckets",
	"ledger_max_trust":   "remove it: an answer is never relied upon for longer than a tenth of the window; a ledger_trust below 1s relies on none for longer than that, at the price of more calls",
	"max_keys":           "write max_buckets",
	"password_lifetime":  "write it in the block of the command, as in password_command token { lifetime 15m }",
	"plain_charges":      "remove it: a script is called where the server refuses plain commands",
	"previous_weight":    "write previous_weights, a list",
	"previous_shards":    "write in each shard that changes what its weight was, as in weight 2 was 1, or was 0 for a new shard; in JSON previous_weights",
	"retired":            "write weight 0 and what it was, as in weight 0 was 1; in JSON previous_weights",

	"addr":           insteadAddress,
	"address":        insteadAddress,
	"allow":          insteadMatch,
	"ban":            "write penalty <duration>",
	"dry_run":        insteadDryRun,
	"limit":          insteadAmount,
	"log_only":       insteadDryRun,
	"max_concurrent": "write algorithm concurrency and events <n>",
	"period":         insteadAmount,
	"rate":           insteadAmount,
	"requests":       insteadAmount,
	"response":       insteadErrors,
	"shadow":         insteadDryRun,
	"whitelist":      insteadMatch,
}

// Instead returns what to write in place of a name that is no option, and "" if that
// is not known.
func Instead(name string) string { return instead[name] }

// inJSON says what to write in place of names that are no fields of JSON, where that is not
// what a Caddyfile needs.
var inJSON = map[string]string{
	"free_status":       "write count_status_not with the statuses, such as [304, \"5xx\"]; for none write \"count_status\": [\"all\"]",
	"password_lifetime": "write lifetime in password_command",
	"previous_weight":   "write previous_weights, a list",
	"previous_shards":   "write previous_weights in each shard that changes",
	"retired":           "write \"weight\": 0, and what it was as previous_weights",
	"addr":              insteadAddressJSON,
	"address":           insteadAddressJSON,
	"allow":             insteadMatchJSON,
	"ban":               "write penalty, with a time span",
	"dry_run":           insteadDryRunJSON,
	"limit":             insteadAmountJSON,
	"log_only":          insteadDryRunJSON,
	"max_concurrent":    "write a zone into zones with \"algorithm\": \"concurrency\", and the number as \"events\"",
	"period":            insteadAmountJSON,
	"rate":              insteadAmountJSON,
	"requests":          insteadAmountJSON,
	"response":          insteadErrorsJSON,
	"shadow":            insteadDryRunJSON,
	"whitelist":         insteadMatchJSON,
}

const (
	insteadAddressJSON = "write primary, with host:port, or url, with redis://host:port"
	insteadAmountJSON  = "write events, with a number, and window, with a time span"
	insteadErrorsJSON  = "write routes in errors of the server: they answer refused requests"
	insteadDryRunJSON  = "write \"enforce\": 0"
	insteadMatchJSON   = "write match, with a matcher that leaves out the requests that are not limited, such as not"
)

// InsteadInJSON returns what to write in place of a name that is no field, and "" if that is
// not known.
func InsteadInJSON(name string) string {
	return cmp.Or(inJSON[name], instead[name])
}
