package simredis

import (
	"math"
	"slices"
	"strconv"
)

// hash has its fields in the order in which they were added. There are few of them.
type hash struct{ fields []field }

type field struct{ name, value string }

func (h *hash) index(name string) int {
	if h == nil {
		return -1
	}
	return slices.IndexFunc(h.fields, func(f field) bool { return f.name == name })
}

// get returns the value of a field, or nil.
func (h *hash) get(name string) any {
	if i := h.index(name); i >= 0 {
		return h.fields[i].value
	}
	return nil
}

// set reports whether the field is new.
func (h *hash) set(name, value string) bool {
	if i := h.index(name); i >= 0 {
		h.fields[i].value = value
		return false
	}
	h.fields = append(h.fields, field{name, value})
	return true
}

// openHash returns the hash of a key, and makes one where nothing is.
func (s *Server) openHash(key string) (*hash, error) {
	h, err := get[*hash](s, key)
	if err == nil && h == nil {
		h = new(hash)
		s.put(key, h, 0)
	}
	return h, err
}

func getField(s *Server, args []string) (any, error) {
	h, err := get[*hash](s, args[1])
	if err != nil {
		return nil, err
	}
	return h.get(args[2]), nil
}

func getFields(s *Server, args []string) (any, error) {
	h, err := get[*hash](s, args[1])
	if err != nil {
		return nil, err
	}
	replies := make([]any, len(args)-2)
	for i, name := range args[2:] {
		replies[i] = h.get(name)
	}
	return replies, nil
}

func countFields(s *Server, args []string) (any, error) {
	h, err := get[*hash](s, args[1])
	if h == nil || err != nil {
		return int64(0), err
	}
	return int64(len(h.fields)), nil
}

func getAllFields(s *Server, args []string) (any, error) {
	h, err := get[*hash](s, args[1])
	if err != nil {
		return nil, err
	}
	replies := []any{}
	if h == nil {
		return replies, nil
	}
	for _, f := range h.fields {
		replies = append(replies, f.name, f.value)
	}
	return replies, nil
}

func setFields(s *Server, args []string) (any, error) {
	if len(args)%2 != 0 {
		return nil, errArity("hset")
	}
	h, err := s.openHash(args[1])
	if err != nil {
		return nil, err
	}
	added := int64(0)
	for pair := range slices.Chunk(args[2:], 2) {
		if h.set(pair[0], pair[1]) {
			added++
		}
	}
	s.changed(args...)
	return added, nil
}

func setNewField(s *Server, args []string) (any, error) {
	h, err := s.openHash(args[1])
	if err != nil || h.index(args[2]) >= 0 {
		return int64(0), err
	}
	h.set(args[2], args[3])
	s.changed(args...)
	return int64(1), nil
}

func removeFields(s *Server, args []string) (any, error) {
	h, err := get[*hash](s, args[1])
	if err != nil {
		return nil, err
	}
	removed := int64(0)
	for _, name := range args[2:] {
		if i := h.index(name); i >= 0 {
			h.fields = slices.Delete(h.fields, i, i+1)
			removed++
		}
	}
	if removed == 0 {
		return removed, nil
	}
	if len(h.fields) == 0 {
		delete(s.keys, args[1])
	}
	s.changed(args...)
	return removed, nil
}

func addToField(s *Server, args []string) (any, error) {
	amount, err := parseInteger(args[3])
	if err != nil {
		return nil, err
	}
	h, err := get[*hash](s, args[1])
	if err != nil {
		return nil, err
	}
	before := int64(0)
	if text, isThere := h.get(args[2]).(string); isThere {
		if before, err = parseInteger(text); err != nil {
			return nil, Error("ERR hash value is not an integer")
		}
	}
	if amount > 0 && before > math.MaxInt64-amount || amount < 0 && before < math.MinInt64-amount {
		return nil, Error("ERR increment or decrement would overflow")
	}
	if h == nil {
		h, _ = s.openHash(args[1])
	}
	h.set(args[2], strconv.FormatInt(before+amount, 10))
	s.changed(args...)
	return before + amount, nil
}
