/* The guest of a virtual machine, as the first sector of its disk: it needs no kernel, and writes to all of
 * its memory without a pause.
 *
 * In each round it looks in each page for what it wrote in the round before, and writes what the next
 * round looks for. After a number of rounds it prints a dot on the debug console; after a page that holds
 * something else, an exclamation mark, and stops. */
    .set FIRST, 0x200000
    .set ROUNDS, 16

    .code16
    .globl _start
_start:
    cli
    xorw %ax, %ax
    movw %ax, %ds
    inb $0x92, %al
    orb $2, %al
    outb %al, $0x92
    lgdtl descriptor
    movl %cr0, %eax
    orb $1, %al
    movl %eax, %cr0
    ljmpl $8, $protected

    .code32
protected:
    movw $16, %ax
    movw %ax, %ds
    xorl %ebx, %ebx
round:
    movl $FIRST, %edi
page:
    /* Both ends of a page: the number of the round, and the same with the page's address. */
    leal (%ebx, %edi), %eax
    testl %ebx, %ebx
    jz write
    cmpl %ebx, (%edi)
    jne wrong
    cmpl %eax, 4092(%edi)
    jne wrong
write:
    incl %eax
    movl %eax, 4092(%edi)
    leal 1(%ebx), %eax
    movl %eax, (%edi)
    addl $4096, %edi
    cmpl $(FIRST + BYTES), %edi
    jb page
    incl %ebx
    testl $(ROUNDS - 1), %ebx
    jnz round
    movb $'.', %al
    outb %al, $0xe9
    jmp round
wrong:
    movb $'!', %al
    outb %al, $0xe9
stopped:
    hlt
    jmp stopped

    .balign 8
table:
    .quad 0
    .quad 0x00cf9a000000ffff
    .quad 0x00cf92000000ffff
descriptor:
    .word descriptor - table - 1
    .long table

    .org 510
    .word 0xaa55
