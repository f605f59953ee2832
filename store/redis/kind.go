package redis

import (
	"context"
	"errors"
	"io"
	"net"

	goredis "github.com/redis/go-redis/v9"
)

// The kinds of errors, few enough for the label of a metric.
const (
	KindTimeout     = "timeout"
	KindConnection  = "connection"
	KindBreaker     = "breaker"
	KindOverload    = "overload"
	KindLoading     = "loading"
	KindReadOnly    = "readonly"
	KindMemory      = "memory"
	KindMisconf     = "misconf"
	KindAuth        = "auth"
	KindForeignData = "foreign_data"
	KindUnfound     = "unfound"
	KindOther       = "other"
)

// kinds are looked through in order. What a server has said comes after what
// was made of it here.
var kinds = []struct {
	kind string
	is   func(err error) bool
}{
	{KindBreaker, isError(ErrShardDown)},
	{KindOverload, isError(errOverload)},
	{KindUnfound, isError(errNoServers)},
	{KindForeignData, isError(errReply)},
	{KindForeignData, hasPrefix("WRONGTYPE")},
	{KindLoading, hasPrefix("LOADING")},
	{KindReadOnly, hasPrefix("READONLY")},
	{KindMemory, hasPrefix("OOM")},
	{KindMisconf, isMisconfError},
	{KindAuth, hasPrefix("NOAUTH")},
	{KindAuth, hasPrefix("WRONGPASS")},
	{KindAuth, hasPrefix("NOPERM")},
	{KindUnfound, hasPrefix("CLUSTERDOWN")},
	{KindUnfound, hasPrefix("MASTERDOWN")},
	{KindConnection, hasPrefix("max number of clients")},
	{KindOther, isRefusal},
	{KindConnection, isDialError},
	{KindTimeout, isError(ErrTimeout)},
	{KindTimeout, isError(context.DeadlineExceeded)},
	{KindTimeout, isNetTimeout},
	{KindConnection, isError(errClosed)},
	{KindConnection, isError(errNoReply)},
	{KindConnection, isError(io.EOF)},
	{KindConnection, isError(net.ErrClosed)},
	{KindConnection, isError(goredis.ErrClosed)},
	{KindConnection, isNetError},
}

// KindOf is the kind of an error of a store.
func KindOf(err error) string {
	for _, k := range kinds {
		if k.is(err) {
			return k.kind
		}
	}
	return KindOther
}

func isError(target error) func(error) bool {
	return func(err error) bool { return errors.Is(err, target) }
}

func hasPrefix(prefix string) func(error) bool {
	return func(err error) bool { return goredis.HasErrorPrefix(err, prefix) }
}

func isNetError(err error) bool {
	var e net.Error
	return errors.As(err, &e)
}

func isNetTimeout(err error) bool {
	var e net.Error
	return errors.As(err, &e) && e.Timeout()
}
