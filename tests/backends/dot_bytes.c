/* dot_bytes and dot_nibbles of int8.h against their definition, on random bytes and on the extremes. */
#include "int8.h"

static int32_t signed_byte(vint v, int lane, int bit) { return (int8_t)(v[lane] >> bit & 255); }

int main(void) {
    uint64_t state = 1;
    for (int n = 0; n < 100000; n++) {
        vint sum, s, expected, nibbles = {0}, expected_nibbles = {0};
        vuint u;
        for (int i = 0; i < LANES; i++) {
            sum[i] = (int32_t)(splitmix64(state++) >> 36);
            u[i] = n % 7 ? (uint32_t)splitmix64(state++) : n % 2 ? 0xffffffffu : 0;
            s[i] = n % 5 ? (int32_t)splitmix64(state++) : n % 3 ? (int32_t)0x81818181u : 0x7f7f7f7f;
            for (int bit = 0; bit < 32; bit += 8) /* -127 to 127 */
                if (signed_byte(s, i, bit) == -128) s[i] ^= 1 << bit;
            expected[i] = sum[i];
            for (int bit = 0; bit < 32; bit += 8) {
                const int32_t by = signed_byte(s, i, bit);
                expected[i] += ((int32_t)(u[i] >> bit & 255) - 128 - BYTE_START) * by;
                expected_nibbles[i] += 8 * (int32_t)(u[i] >> bit & 15) * by; /* 32 inputs */
            }
        }
        sum = dot_bytes(sum, u, s);
        for (int times = 0; times < 8; times++) nibbles = dot_nibbles(nibbles, u & 0x0f0f0f0f, s);
        nibbles = sum_nibbles(nibbles);
        if (memcmp(&sum, &expected, sizeof sum)) return 1;
        if (memcmp(&nibbles, &expected_nibbles, sizeof nibbles)) return 2;
    }
    return 0;
}
