/* Prints sums of bfloat16 products (pairs.h) of hard numbers: some are subnormal, cancel or overflow. */
#include <stdio.h>
#include "pairs.h"

static uint64_t state;

/* 16 bits of a float: an exponent near `middle`, any sign and mantissa. */
static uint32_t hard_number(int middle) {
    const uint64_t random = splitmix64(state++);
    const int exponent = middle + (int)(random >> 32 & 15) - 8;
    const uint32_t bounded = (uint32_t)(exponent < 0 ? 0 : exponent > 255 ? 255 : exponent);
    return (uint32_t)(random & 0x807f) | bounded << 7;
}

int main(void) {
    static const int middles[] = {4, 32, 64, 127, 190, 240};
    for (int n = 0; n < 20000; n++) {
        const int first = middles[n % 6], second = middles[n / 6 % 6], sum = first + second - 127 + n % 3 * 6;
        vuint a, b, sums;
        for (int i = 0; i < LANES; i++) {
            a[i] = hard_number(first) | hard_number(first) << 16;
            b[i] = hard_number(second) | hard_number(second) << 16;
            sums[i] = hard_number(sum) << 16 | (uint32_t)(splitmix64(state++) & 0xffff);
        }
        sums = (vuint)dot_pairs((vfloat)sums, a, b);
        for (int i = 0; i < LANES; i++) /* all that are not numbers are one */
            printf("%08x\n", (sums[i] & 0x7fffffff) > 0x7f800000 ? 0x7fc00000 : sums[i]);
    }
    return 0;
}
