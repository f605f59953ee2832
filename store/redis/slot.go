package redis

// slotCount is how many slots the keys of a Redis Cluster are spread over.
const slotCount = 1 << 14

// slotOf returns the slot of a hash tag: its CRC-16 (XMODEM), by which Redis
// Cluster spreads keys.
func slotOf(tag []byte) uint16 {
	var crc uint16
	for _, b := range tag {
		crc = crc<<8 ^ crcTable[byte(crc>>8)^b]
	}
	return crc % slotCount
}

// crcTable has the effect of each byte on the CRC.
var crcTable = func() (table [256]uint16) {
	const polynomial = 0x1021
	for i := range table {
		crc := uint16(i) << 8
		for range 8 {
			if carry := crc&0x8000 != 0; carry {
				crc = crc<<1 ^ polynomial
			} else {
				crc <<= 1
			}
		}
		table[i] = crc
	}
	return table
}()
