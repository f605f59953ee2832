package simredis

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// command is a command that scripts can call too.
type command struct {
	// arity is the number of words, its own included; the least of them if it is less
	// than 0.
	arity int
	// writes is set if it changes anything.
	writes bool
	run    func(s *Server, args []string) (any, error)
}

// commands are those without scripts, in capital letters.
var commands = map[string]*command{
	"TIME": {1, false, readTime},

	"EXISTS":      {-2, false, exists},
	"DEL":         {-2, true, remove},
	"PEXPIRE":     {-3, true, expireIn},
	"PEXPIREAT":   {3, true, expireAt},
	"PEXPIRETIME": {2, false, expiryOf},
	"PTTL":        {2, false, timeToLive},
	"DUMP":        {2, false, dump},
	"RESTORE":     {-4, true, restore},

	"GET":  {2, false, getString},
	"MGET": {-2, false, getStrings},
	"SET":  {-3, true, setString},

	"HGET":    {3, false, getField},
	"HMGET":   {-3, false, getFields},
	"HGETALL": {2, false, getAllFields},
	"HLEN":    {2, false, countFields},
	"HSET":    {-4, true, setFields},
	"HSETNX":  {4, true, setNewField},
	"HDEL":    {-3, true, removeFields},
	"HINCRBY": {4, true, addToField},

	"ZADD":            {-4, true, addMembers},
	"ZREM":            {-3, true, removeMembers},
	"ZREMRANGEBYRANK": {4, true, removeRanks},
	"ZCARD":           {2, false, countMembers},
	"ZCOUNT":          {4, false, countScores},
	"ZMSCORE":         {-3, false, scoresOf},
	"ZRANGE":          {-4, false, rangeMembers},
}

// commandOf returns the command of that name, or nil.
func commandOf(name string) *command { return commands[strings.ToUpper(name)] }

func (c *command) takes(words int) bool {
	if c.arity < 0 {
		return words >= -c.arity
	}
	return words == c.arity
}

func errUnknown(args []string) Error {
	if len(args) == 0 {
		return "ERR unknown command ''"
	}
	text := fmt.Sprintf("ERR unknown command '%s', with args beginning with: ", args[0])
	for _, arg := range args[1:] {
		text += "'" + arg + "' "
	}
	return Error(text)
}

func errArity(name string) Error {
	return Error(fmt.Sprintf("ERR wrong number of arguments for '%s' command", strings.ToLower(name)))
}

func parseInteger(text string) (int64, error) {
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || strconv.FormatInt(n, 10) != text {
		return 0, errNotInteger
	}
	return n, nil
}

func parseFloat(text string) (float64, error) {
	f, err := strconv.ParseFloat(text, 64)
	if err != nil && !math.IsInf(f, 0) || math.IsNaN(f) {
		return 0, errNotFloat
	}
	return f, nil
}

// formatFloat is C's %.17g, by which Redis makes a text of a number of Lua, and of a score.
func formatFloat(f float64) string {
	if n := int64(f); float64(n) == f && n != 0 && n < 1e17 && n > -1e17 {
		return strconv.FormatInt(n, 10)
	}
	switch {
	case math.IsInf(f, 1):
		return "inf"
	case math.IsInf(f, -1):
		return "-inf"
	}
	return strconv.FormatFloat(f, 'g', 17, 64)
}
