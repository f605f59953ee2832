package simredis

import (
	"strconv"
	"strings"
)

func getString(s *Server, args []string) (any, error) {
	text, err := get[string](s, args[1])
	if err != nil || text == "" && s.find(args[1]) == nil {
		return nil, err
	}
	return text, nil
}

// getStrings is MGET, for which a key that holds no string is missing.
func getStrings(s *Server, args []string) (any, error) {
	replies := make([]any, len(args)-1)
	for i, key := range args[1:] {
		if e := s.find(key); e != nil {
			if text, isString := e.value.(string); isString {
				replies[i] = text
			}
		}
	}
	return replies, nil
}

// setString is SET key text [PX span | PXAT instant].
func setString(s *Server, args []string) (any, error) {
	if len(args) == 3 {
		s.put(args[1], args[2], 0)
		s.changed(args...)
		return ok, nil
	}
	if len(args) != 5 {
		return nil, errSyntax
	}
	relative := strings.EqualFold(args[3], "PX")
	if !relative && !strings.EqualFold(args[3], "PXAT") {
		return nil, errSyntax
	}
	instant, err := parseInteger(args[4])
	if err != nil {
		return nil, err
	}
	if instant <= 0 {
		return nil, Error("ERR invalid expire time in 'set' command")
	}
	if relative {
		instant += s.at.UnixMilli()
	}
	s.put(args[1], args[2], instant)
	s.changed("SET", args[1], args[2], "PXAT", strconv.FormatInt(instant, 10))
	return ok, nil
}
