package simredis

import (
	"encoding/binary"
	"slices"
	"strconv"
	"strings"
)

func readTime(s *Server, _ []string) (any, error) {
	micros := s.at.UnixMicro()
	return []any{strconv.FormatInt(micros/1e6, 10), strconv.FormatInt(micros%1e6, 10)}, nil
}

func exists(s *Server, args []string) (any, error) {
	n := int64(0)
	for _, key := range args[1:] {
		if s.find(key) != nil {
			n++
		}
	}
	return n, nil
}

func remove(s *Server, args []string) (any, error) {
	n := int64(0)
	for _, key := range args[1:] {
		if s.find(key) != nil {
			delete(s.keys, key)
			n++
		}
	}
	if n > 0 {
		s.changed(args...)
	}
	return n, nil
}

func expireIn(s *Server, args []string) (any, error) {
	for _, option := range args[3:] {
		if !strings.EqualFold(option, "NX") {
			return nil, Error("ERR Unsupported option " + option)
		}
	}
	span, err := parseInteger(args[2])
	if err != nil {
		return nil, err
	}
	if e := s.find(args[1]); len(args) > 3 && e != nil && e.expiry != 0 {
		return int64(0), nil
	}
	return s.expireAt(args[1], s.at.UnixMilli()+span), nil
}

func expireAt(s *Server, args []string) (any, error) {
	instant, err := parseInteger(args[2])
	if err != nil {
		return nil, err
	}
	return s.expireAt(args[1], instant), nil
}

// expireAt sets the expiry of a key, or removes it if that has come, and returns 1; 0 if
// there is nothing.
func (s *Server) expireAt(key string, instant int64) int64 {
	e := s.find(key)
	switch {
	case e == nil:
		return 0
	case s.hasCome(instant):
		s.expire(key)
	default:
		e.expiry = instant
		s.changed("PEXPIREAT", key, strconv.FormatInt(instant, 10))
	}
	return 1
}

// hasCome reports whether what would expire at an instant is not kept. A replica keeps all.
func (s *Server) hasCome(instant int64) bool {
	return !s.applying && instant <= s.at.UnixMilli()
}

func expiryOf(s *Server, args []string) (any, error) {
	e := s.find(args[1])
	switch {
	case e == nil:
		return int64(-2), nil
	case e.expiry == 0:
		return int64(-1), nil
	}
	return e.expiry, nil
}

func timeToLive(s *Server, args []string) (any, error) {
	reply, err := expiryOf(s, args)
	if instant := reply.(int64); instant > 0 {
		return max(instant-s.at.UnixMilli(), 0), err
	}
	return reply, err
}

// dumpMark begins what DUMP returns.
const dumpMark = "simredis:"

const errDump Error = "ERR DUMP payload version or checksum are wrong"

func dump(s *Server, args []string) (any, error) {
	e := s.find(args[1])
	if e == nil {
		return nil, nil
	}
	texts := []string{"string"}
	switch value := e.value.(type) {
	case string:
		texts = append(texts, value)
	case *hash:
		texts[0] = "hash"
		for _, f := range value.fields {
			texts = append(texts, f.name, f.value)
		}
	case *sortedSet:
		texts[0] = "zset"
		for _, m := range value.members {
			texts = append(texts, m.name, formatFloat(m.score))
		}
	}
	content := []byte(dumpMark)
	for _, text := range texts {
		content = append(binary.AppendUvarint(content, uint64(len(text))), text...)
	}
	return string(content), nil
}

// loadDump is the opposite of dump.
func loadDump(content string) (value any, err error) {
	rest, found := strings.CutPrefix(content, dumpMark)
	if !found {
		return nil, errDump
	}
	var texts []string
	for b := []byte(rest); len(b) > 0; {
		size, n := binary.Uvarint(b)
		if n <= 0 || size > uint64(len(b)-n) {
			return nil, errDump
		}
		end := n + int(size)
		texts, b = append(texts, string(b[n:end])), b[end:]
	}
	if len(texts) < 2 {
		return nil, errDump
	}
	switch kind, content := texts[0], texts[1:]; kind {
	case "string":
		return content[0], nil
	case "hash":
		h := new(hash)
		for pair := range slices.Chunk(content, 2) {
			h.set(pair[0], pair[1])
		}
		return h, nil
	case "zset":
		z := newSortedSet()
		for pair := range slices.Chunk(content, 2) {
			score, err := parseFloat(pair[1])
			if err != nil {
				return nil, errDump
			}
			z.set(pair[0], score)
		}
		return z, nil
	}
	return nil, errDump
}

// restore is RESTORE key instant content [ABSTTL].
func restore(s *Server, args []string) (any, error) {
	absolute := len(args) == 5 && strings.EqualFold(args[4], "ABSTTL")
	if len(args) > 4 && !absolute {
		return nil, errSyntax
	}
	if s.find(args[1]) != nil {
		return nil, Error("BUSYKEY Target key name already exists.")
	}
	instant, err := parseInteger(args[2])
	if err != nil {
		return nil, err
	}
	if instant < 0 {
		return nil, Error("ERR Invalid TTL value, must be >= 0")
	}
	value, err := loadDump(args[3])
	if err != nil {
		return nil, err
	}
	if instant > 0 && !absolute {
		instant += s.at.UnixMilli()
	}
	if instant > 0 && s.hasCome(instant) {
		return ok, nil
	}
	s.put(args[1], value, instant)
	s.changed("RESTORE", args[1], strconv.FormatInt(instant, 10), args[3], "ABSTTL")
	return ok, nil
}
