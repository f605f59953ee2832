package redistest

import "strings"

// Slots is the number of hash slots of a Redis Cluster; they count from 0.
const Slots = 16384

// Keyslot is the hash slot of a key. Keys with the same tag, which is what
// stands between the first { and the next }, have the same slot.
func Keyslot(key string) int {
	if _, after, ok := strings.Cut(key, "{"); ok {
		if tag, _, ok := strings.Cut(after, "}"); ok && tag != "" {
			key = tag
		}
	}
	// CRC-16/XMODEM.
	var crc uint16
	for i := range len(key) {
		crc ^= uint16(key[i]) << 8
		for range 8 {
			carry := crc&0x8000 != 0
			crc <<= 1
			if carry {
				crc ^= 0x1021
			}
		}
	}
	return int(crc) % Slots
}
